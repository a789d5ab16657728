"""What is written beside its place, what stays when a write fails, what rotation leaves, and what no file holds."""

import errno
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback

from tests import grpo_trainers
from tests.nightly import daily
from tests.preferences import pairs
from tests.reward_trainers import trainer as reward_trainer
from tests.reward_trainers import warnings_of
from trl_ext.errors import ConfigError, StorageError
from trl_ext.trainers.checkpoints import save
from trl_ext.trainers.checkpoints.manifest import MANIFEST, UNFINISHED, Manifest
from trl_ext.trainers.checkpoints.save import is_whole
from trl_ext.trainers.ending import run_end

TOKEN = "hf_verysecret"
SAVES = dict(save_strategy="steps", save_steps=1, max_steps=4, logging_steps=1)


def trainer(folder, *callbacks, **changes):
    return reward_trainer(folder, callbacks=list(callbacks), **{**SAVES, **changes})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


class SmallDisk(TrainerCallback):
    """Writes of more than 60,000 bytes fail in the saves of these steps, in the kernel."""

    def __init__(self, *of_steps: int):
        self.of_steps = of_steps

    def on_step_end(self, args, state, control, **kwargs):
        limit = 60_000 if state.global_step in self.of_steps else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.fixture(autouse=True)
def large_disk():
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# Failures ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_does_not_end_training_while_a_checkpoint_stands(tmp_path, caplog):
    done = trainer(tmp_path, SmallDisk(2, 3))
    done.train()
    assert done.state.global_step == 4
    assert steps(tmp_path) == [1, 4]
    assert all(map(is_whole, tmp_path.glob("checkpoint-*")))
    assert not (tmp_path / UNFINISHED).exists()
    said = [line for line in warnings_of(caplog) if "could not be written" in line]
    assert [line.split(" could")[0] for line in said] == [f"The checkpoint of step {n}" for n in (2, 3)]
    assert "File too large" in said[0] and said[0].endswith("Training goes on; checkpoint-1 stands.")


class Fails(TrainerCallback):
    """Moving checkpoints to their place fails from this step on, as where the file system was mounted anew."""

    def __init__(self, monkeypatch, code, from_step=2):
        self.monkeypatch, self.code, self.from_step = monkeypatch, code, from_step

    def on_step_end(self, args, state, control, **kwargs):
        def fail(source, *_):
            raise OSError(self.code, os.strerror(self.code), str(source))

        if state.global_step == self.from_step:
            self.monkeypatch.setattr(save.os, "rename", fail)


@pytest.mark.parametrize("code", daily([errno.EROFS, errno.EXDEV, errno.EACCES, errno.EPERM], errno.EROFS))
def test_the_third_save_that_fails_for_a_lasting_reason_ends_the_run(code, tmp_path, monkeypatch):
    subject = trainer(tmp_path, Fails(monkeypatch, code), max_steps=9)
    with pytest.raises(StorageError, match=r"step 4 could not be written.*third in a row.*checkpoint-1 stands"):
        subject.train()
    assert subject.state.global_step == 4 and steps(tmp_path) == [1]


@pytest.mark.parametrize("code", daily([errno.ENOSPC, errno.EDQUOT], errno.ENOSPC))
def test_a_disk_that_stays_full_never_ends_the_run(code, tmp_path, monkeypatch):
    subject = trainer(tmp_path, Fails(monkeypatch, code), max_steps=6)
    subject.train()
    assert subject.state.global_step == 6 and steps(tmp_path) == [1]


def test_of_safetensors_the_text_tells_a_reason_that_lasts():
    lasts = SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)")
    passes = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (save._is_lasting(lasts), save._is_lasting(passes), save._is_lasting(None)) == (True, False, False)


def test_the_report_never_ends_in_a_traceback(tmp_path, caplog, monkeypatch):
    class Replaces(TrainerCallback):
        """Puts a file into the place of the output folder."""

        def on_train_end(self, args, state, control, **kwargs):
            shutil.rmtree(args.output_dir)
            Path(args.output_dir).write_text("")

    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    trainer(tmp_path / "out", Replaces(), max_steps=1).train()
    assert "Traceback" not in caplog.text
    said = [line for line in warnings_of(caplog) if line.startswith("The report")]
    assert len(said) == 1 and said[0].startswith("The report could not be written (")


def test_a_full_disk_ends_training_where_no_checkpoint_stands(tmp_path):
    with pytest.raises(ConfigError, match=r"step 1 could not be written: process 0: .*There is no earlier one in"):
        trainer(tmp_path, SmallDisk(1)).train()
    assert not steps(tmp_path)


METHODS = ("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")


@pytest.mark.parametrize("method", daily(METHODS, METHODS[0]))
def test_any_other_error_of_a_save_is_not_hidden(method, tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Trainer, method, out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(tmp_path).train()


class Looks(TrainerCallback):
    """Notes which checkpoints there are whenever one is said to be saved."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(steps(Path(args.output_dir)))


# Place and rotation -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_never_half_written_in_its_place_and_replaces_what_stood_there(tmp_path, monkeypatch):
    place, seen, write = tmp_path / "checkpoint-2", [], Manifest.write

    class Leaves(TrainerCallback):
        """Makes the folder that transformers writes before a save that SIGTERM asks for."""

        def on_train_begin(self, args, state, control, **kwargs):
            place.mkdir()
            (place / "checkpoint-is-incomplete.txt").touch()

    def watched(self, folder):
        seen.append((folder.parent.name, steps(tmp_path)))
        write(self, folder)

    monkeypatch.setattr(Manifest, "write", watched)
    trainer(tmp_path, Leaves(), max_steps=2).train()
    assert seen == [(UNFINISHED, [2]), (UNFINISHED, [1, 2])]
    assert is_whole(place)
    assert not (place / "checkpoint-is-incomplete.txt").exists()


def test_rotation_keeps_the_newest_and_the_best_and_leaves_alone_what_is_not_whole(tmp_path):
    class Worsens(TrainerCallback):
        """Makes the evaluation of step 2 the best one, and a folder that is not whole."""

        def on_train_begin(self, args, state, control, **kwargs):
            (tmp_path / "checkpoint-0").mkdir()
            (tmp_path / "checkpoint-0" / "someone's").write_text("file")

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_loss"] = abs(state.global_step - 2.0)

    looks = Looks()
    evaluates = dict(eval_strategy="steps", eval_steps=1, eval_dataset=pairs(4), load_best_model_at_end=True)
    done = trainer(tmp_path, Worsens(), looks, save_total_limit=2, max_steps=5, **evaluates)
    done.train()
    assert looks.seen == [[0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 4], [0, 2, 5]]
    assert done.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    for step in (2, 5):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(p, done.model.state_dict()[n]) for n, p in best.state_dict().items())


def test_rotation_never_removes_the_last_whole_checkpoint(tmp_path):
    looks = Looks()
    trainer(tmp_path, looks, SmallDisk(2, 3), save_total_limit=1).train()
    assert looks.seen == [[1], [1], [1], [4]]


def test_a_checkpoint_is_one_of_transformers(tmp_path):
    done = trainer(tmp_path, max_steps=1)
    done.train()
    checkpoint = tmp_path / "checkpoint-1"
    _model, info = AutoModelForSequenceClassification.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    names = {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert names | {"training_args.bin", "tokenizer.json", MANIFEST} <= {path.name for path in checkpoint.iterdir()}


# Hub --------------------------------------------------------------------------------------------------------------


def test_the_hub_gets_the_checkpoint_when_it_is_whole(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *_: None)
    push = lambda self, folder: pushed.append((folder, is_whole(Path(folder))))  # noqa: E731
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    done = trainer(tmp_path, max_steps=2, push_to_hub=True, hub_model_id="nobody/nothing")
    monkeypatch.setattr(done, "_finish_current_push", lambda: None)
    done.train()
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (1, 2)]


def test_no_saved_file_holds_the_token_of_the_hub(tmp_path):
    done = trainer(tmp_path, max_steps=1, hub_token=TOKEN, model_init_kwargs={"token": TOKEN})
    done.train()
    done.save_model(str(tmp_path / "final"))
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert done.args.hub_token == TOKEN
    loaded = torch.load(tmp_path / "final" / "training_args.bin", weights_only=False)
    assert loaded.hub_token is None
    assert loaded.learning_rate == done.args.learning_rate


# Logs -------------------------------------------------------------------------------------------------------------


class WritesToFull(TrainerCallback):
    """Logs to a disk that is full, as a progress file would."""

    def on_log(self, args, state, control, **kwargs):
        with open("/dev/full", "w") as file:
            file.write("full")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_disk_that_is_full_while_a_run_logs_does_not_end_it_and_other_errors_do(tmp_path, monkeypatch):
    class Absent(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            open("/no/such/file")

    said = []
    monkeypatch.setattr(run_end.logger, "warning", said.append)
    (tmp_path / "completions").mkdir()
    for step in (1, 2):
        (tmp_path / "completions" / f"completions_{step:05d}.parquet").symlink_to("/dev/full")
    grpo_trainers.trainer(tmp_path, log_completions=True).train()
    assert [text.partition(":")[0] for text in said] == ["Step 1", "Step 2"]
    assert all("No space left" in text for text in said)
    said.clear()
    subject = grpo_trainers.trainer(tmp_path, callbacks=[WritesToFull()])
    subject.train()
    assert [text.partition(":")[0] for text in said] == ["Step 1", "Step 2"]
    assert not subject._metrics["train"]
    assert [entry["step"] for entry in subject.state.log_history] == [1, 2, 2]
    with pytest.raises(FileNotFoundError):
        grpo_trainers.trainer(tmp_path, callbacks=[Absent()]).train()

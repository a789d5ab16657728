"""A run that fails leaves its numbers, its report and the reason."""

import json
import math
import os
import signal

import pytest
from transformers import TrainerCallback

from tests import grpo_trainers, reward_trainers
from tests.faults import forks
from trl_ext.cli.main import main
from trl_ext.errors import TrlExtError
from trl_ext.monitor.log_keys import ERROR
from trl_ext.monitor.record import LOG_FILE, read_log, read_log_history
from trl_ext.rewards import Judge, RuleSet

SAVES = dict(max_steps=4, save_strategy="steps", save_steps=2, logging_steps=1)


class Does(TrainerCallback):
    """Does something at the beginning of step 3."""

    def __init__(self, what):
        self.what = what

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.what()


def raises_later(completion_ids, trainer_state, **_):
    if trainer_state.global_step == 2:
        raise RuntimeError("the reward is\nbroken")
    return grpo_trainers.reward(completion_ids)


def with_judge(folder):
    judge = Judge(model="m", base_url="http://127.0.0.1:9/v1", rubric="Is it one?", retries=0)
    return grpo_trainers.trainer(folder, rewards=RuleSet([judge]), per_device_train_batch_size=8, **SAVES)


def with_nan(folder):
    trainer = grpo_trainers.trainer(folder, **SAVES)
    last = list(trainer.model.parameters())[-1]
    last.register_hook(lambda grad: grad * math.nan if trainer.state.global_step == 2 else grad)
    return trainer


# How it fails, steps that were logged, and words of the reason.
FAILURES = {
    "a judge that is down": (with_judge, 2, "rows of rule 'judge' were not judged"),
    "a reward that raises": (
        lambda folder: grpo_trainers.trainer(folder, rewards=raises_later, **SAVES),
        2,
        "RuntimeError: the reward is broken",
    ),
    "a gradient that is NaN": (with_nan, 2, "The norm of the gradient is nan in step 3"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_run_that_fails_leaves_log_report_and_reason(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    make, num_steps, reason = FAILURES[kind]
    with pytest.raises(TrlExtError) as caught:
        make(tmp_path).train()
    entries = read_log_history(tmp_path)
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, num_steps + 1))
    assert reason in entries[-1][ERROR] and entries[-1]["step"] == num_steps
    assert " ".join(str(caught.value).split()) in entries[-1][ERROR]
    words = f"It failed after step {num_steps}: "
    assert words in (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert words in (tmp_path / "report.html").read_text()
    assert f"{num_steps} steps" in capsys.readouterr().out


def reward_run(folder, *callbacks, **changes):
    trainer = reward_trainers.trainer(folder, **SAVES | changes)
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def test_a_killed_run_leaves_its_log_from_which_the_report_is_made(tmp_path):
    (tmp_path / "out").mkdir()
    kill = Does(lambda: os.kill(os.getpid(), signal.SIGKILL))
    run = forks.in_fork(tmp_path, lambda: reward_run(tmp_path / "out", kill, save_steps=500).train() and None)
    assert run.code == -signal.SIGKILL
    assert [entry["step"] for entry in read_log_history(tmp_path / "out")] == [1, 2]
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Stopped or still running: 2 of 4 steps" in (tmp_path / "out" / "report.html").read_text()


def test_after_a_resume_no_step_stands_twice_and_none_beyond_the_checkpoint(tmp_path):
    with pytest.raises(KeyError):
        reward_run(tmp_path, Does({}.popitem), save_steps=1).train()
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2, 2]
    reward_run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again = read_log(tmp_path)
    assert [entry["step"] for entry in again] == [1, 2, 3, 4, 4]
    assert not any(ERROR in entry for entry in again) and again[-1]["train_runtime"]


def test_the_log_is_the_history_to_the_last_number_and_a_fresh_run_begins_it_anew(tmp_path):
    (tmp_path / LOG_FILE).write_text('{"loss": 1.0, "step": 99}\n')
    trainer = reward_run(
        tmp_path, eval_strategy="steps", eval_steps=2, eval_dataset=reward_trainers.PAIRS.select(range(4))
    )
    trainer.train()
    assert read_log(tmp_path) == json.loads(json.dumps(trainer.state.log_history))


def test_a_log_that_cannot_be_written_ends_nothing_and_is_made_up_for(tmp_path, caplog):
    def block():
        (tmp_path / LOG_FILE).rename(tmp_path / "kept")
        (tmp_path / LOG_FILE).mkdir()

    def unblock(trainer):
        (tmp_path / LOG_FILE).rmdir()
        (tmp_path / "kept").rename(tmp_path / LOG_FILE)

    trainer = reward_run(tmp_path, Does(block))
    trainer.add_callback(type("Last", (TrainerCallback,), {"on_train_end": lambda *_, **__: unblock(trainer)}))
    trainer.train()
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2, 3, 4, 4]
    assert any(
        said.startswith(f"{LOG_FILE} or completions could not be written")
        for said in reward_trainers.warnings_of(caplog)
    )


def test_a_line_that_a_kill_has_cut_is_left_out_and_a_damaged_one_is_a_sentence(tmp_path):
    (tmp_path / LOG_FILE).write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.5, "st')
    assert [entry["step"] for entry in read_log(tmp_path)] == [1]
    (tmp_path / LOG_FILE).write_text('{"loss": 1.0, "st\n{"loss": 0.5, "step": 2}\n')
    with pytest.raises(Exception, match=r"log.jsonl is damaged"):
        read_log(tmp_path)

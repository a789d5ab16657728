"""A run resumes from the newest whole checkpoint of its own, and from no other without being told to."""

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests import grpo_trainers, ppo_trainers, reward_trainers, sampling_servers, tiny
from tests.faults import forks, jobs
from tests.nightly import daily, nightly
from tests.ppo_trainers import distance, trained_weights
from trl_ext import RuleSet
from trl_ext.errors import ConfigError
from trl_ext.rewards import Call
from trl_ext.trainers.checkpoints import fingerprint
from trl_ext.trainers.checkpoints.manifest import MANIFEST, Manifest
from trl_ext.trainers.checkpoints.save import step_of

STEPS = 3


def length_of_text(row) -> float:
    return float(len(row.text))


def rules(function=length_of_text, **changes) -> RuleSet:
    return RuleSet([Call(function, isolate=False, name="call", **changes)], normalise=True)


SAVES = dict(save_strategy="steps", save_steps=1)


def trainer(folder, reward=None, **changes):
    prompts = Dataset.from_dict({"prompt": [tiny.words(5 + i, 6) for i in range(16)]})
    settings = SAVES | dict(max_steps=STEPS, max_completion_length=4, rollout_func=None, data=prompts) | changes
    return grpo_trainers.trainer(folder, rewards=reward or rules(), **settings)


def same(one, weights) -> bool:
    """Whether a trainer ends with these weights, to the bit."""
    return distance(trained_weights(one), weights) == 0


def resumed(folder, point=True, **changes):
    """A trainer that has gone on to its end."""
    found = trainer(folder, **changes)
    found.train(resume_from_checkpoint=point)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    whole = trainer(folder)
    whole.train()
    return folder, trained_weights(whole)


@pytest.fixture
def folder(run, tmp_path):
    """A copy of the run's folder without its last checkpoint; whoever resumes has one step to go."""
    copied = shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(copied / f"checkpoint-{STEPS}")
    return copied


def test_a_checkpoint_lists_all_that_lies_in_it_and_nothing_is_left_over(run):
    for step in range(1, STEPS + 1):
        checkpoint = run[0] / f"checkpoint-{step}"
        manifest = Manifest.read(checkpoint)
        assert {*manifest.files, MANIFEST} == {p.name for p in checkpoint.iterdir()}
        assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rules.json", "rollouts_0.pt"} < set(manifest.files)
        assert manifest.step == step
    assert not list(run[0].glob("_*"))


def test_the_newest_whole_checkpoint_is_taken_and_the_others_are_named(run, folder, caplog):
    (folder / "checkpoint-2" / "rules.json").unlink()
    (folder / "checkpoint-7").mkdir()
    again = resumed(folder)
    assert same(again, run[1])
    said = reward_trainers.warnings_of(caplog)
    assert "Passed over checkpoint-7: it has no manifest.json. Resuming from checkpoint-1." in said
    assert "Passed over checkpoint-2: rules.json is missing. Resuming from checkpoint-1." in said


def test_a_checkpoint_has_its_prefix_and_a_step():
    names = {"checkpoint-7": 7, "7": None, "checkpoint-": None, "checkpoint-x": None, "my-checkpoint-7": None}
    assert {name: step_of(Path(name)) for name in names} == names


def test_a_checkpoint_that_only_lacked_its_renaming_is_taken(run, folder):
    (folder / "_unfinished").mkdir()
    os.rename(folder / "checkpoint-2", folder / "_unfinished" / "checkpoint-2")
    shutil.rmtree(folder / "checkpoint-1")
    again = resumed(folder)
    assert same(again, run[1])
    assert not (folder / "_unfinished").exists()


def test_a_damaged_checkpoint_that_was_named_is_refused_with_the_one_that_is_whole(folder):
    path = folder / "checkpoint-2" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"checkpoint-2: optimizer.pt is damaged. \S+checkpoint-1 is whole\."):
        resumed(folder, str(folder / "checkpoint-2"))


# What transformers, accelerate or we look for by name in a checkpoint.
ADDED = ("scaler.pt", "optimizer.bin", "pytorch_model.bin", "adapter_model.safetensors")
ADDED += ("model.safetensors.index.json", "curriculum.npz", "ahead.json", "critic.json")


def test_files_that_were_added_to_a_checkpoint_do_not_count(run, folder):
    for name in ADDED:
        path = folder / "checkpoint-2" / name
        assert not path.exists()
        torch.save({"scale": 1.0}, path)
    assert same(resumed(folder), run[1])


def test_an_added_adapter_is_named_as_transformers_would_load_it(folder):
    (folder / "checkpoint-2" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    words = r"checkpoint-2: adapter_config.json was added, as its manifest.json does not name it: remove it"
    with pytest.raises(ConfigError, match=words):
        resumed(folder, str(folder / "checkpoint-2"))


def test_without_a_whole_checkpoint_nothing_begins(folder, tmp_path):
    for step in (1, 2):
        (folder / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"")
    words = r"No checkpoint in .* is whole: checkpoint-2: model.safetensors has 0 bytes"
    with pytest.raises(ConfigError, match=words):
        resumed(folder)
    with pytest.raises(ConfigError, match=r"There is no checkpoint in .* to resume from"):
        resumed(tmp_path / "empty")


def test_a_checkpoint_without_manifest_needs_the_flag(run, folder):
    for step in (1, 2):
        (folder / f"checkpoint-{step}" / MANIFEST).unlink()
    for point in (True, str(folder / "checkpoint-2")):
        with pytest.raises(ConfigError, match=r"it has no manifest.json.*resume_despite=manifest"):
            resumed(folder, point)
    again = resumed(folder, resume_despite=["manifest"])
    assert same(again, run[1])


OTHERS = {
    "model": ("rope_theta", lambda: dict(model=tiny.model("llama", rope_theta=500.0))),
    "rules": (r"rules.rewards\[0\].rules\[0\].weight was 1.0 and is 2.0", lambda: dict(reward=rules(weight=2.0))),
    "data": ("data.content", lambda: dict(data=Dataset.from_dict({"prompt": [tiny.words(9, 8)] * 16}))),
    "seed": ("seed.seed was 42 and is 43", lambda: dict(seed=43)),
    "settings": ("settings.temperature was 1.0 and is 0.7", lambda: dict(temperature=0.7)),
}


def test_a_secret_that_an_earlier_version_wrote_into_a_checkpoint_is_no_difference(run, folder):
    checkpoint = folder / f"checkpoint-{STEPS - 1}"
    manifest = Manifest.read(checkpoint)
    settings = manifest.run["settings"] | {"chat_template_kwargs": [["plain", 1], ["sas_token", "old"]]}
    replace(manifest, run={**manifest.run, "settings": settings}).write(checkpoint)
    again = resumed(folder, chat_template_kwargs={"plain": 1, "sas_token": "new"})
    assert same(again, run[1])
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        resumed(folder, checkpoint, chat_template_kwargs={"plain": 2, "sas_token": "new"})


@pytest.mark.parametrize("part", OTHERS)
def test_another_run_is_refused_in_one_sentence_unless_told(part, folder):
    told, changes = OTHERS[part]
    with pytest.raises(ConfigError, match=rf"checkpoint-2 is of another run: .*{told}.*resume_despite to {part}"):
        resumed(folder, **changes())
    assert resumed(folder, resume_despite=[part], **changes()).state.global_step == STEPS


# Kinds, and what a checkpoint brings along --------------------------------------------------------------------------


def reward_run(folder, **changes):
    return reward_trainers.trainer(folder, **SAVES | dict(max_steps=2) | changes)


def of_the_same_name(text, folder, version):
    """Return the function `scores` of a module that users have written, in one of its versions."""
    path = folder / f"own_{version}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("own", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["own"] = module
    return module.scores


PLAIN = "def scores(completions, **kwargs):\n    return [float(len(text)){} for text in completions]\n"
MADE = "def make(n):\n    def scores(completions, **_):\n        return [n for _ in completions]\n    return scores\n"
CLASS = "class Scores:\n    def __call__(self, completions, **_):\n        return [{}.0 for _ in completions]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PLAIN.format(""), PLAIN.format(" + 1.0")),
        (f"{MADE}scores = make(1)\n", f"{MADE}scores = make(2)\n"),
        (f"{CLASS.format(1)}scores = Scores()\n", f"{CLASS.format(2)}scores = Scores()\n"),
    ],
    ids=["its text", "a number that it was made with", "its class"],
)
def test_another_reward_function_of_the_same_name_is_another_run(before, after, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own", None)  # restored after `of_the_same_name`
    texts = enumerate((before, before, after))
    first, same, other = [dict(fingerprint.sources_of(of_the_same_name(text, tmp_path, i))) for i, text in texts]
    assert first == same != other and first.keys() == other.keys()


def test_a_changed_reward_function_is_a_sentence_unless_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own", None)
    before, after = (of_the_same_name(PLAIN.format(text), tmp_path, text or "0") for text in ("", "+1"))
    trainer(tmp_path / "out", before, max_steps=1).train()
    sentence = r"rewards\.the source of scores, number 1 was .* and is .*set resume_despite to rewards to accept"
    with pytest.raises(ConfigError, match=sentence):
        resumed(tmp_path / "out", reward=after, max_steps=2)
    assert resumed(tmp_path / "out", reward=after, max_steps=2, resume_despite="rewards").state.global_step == 2


def test_a_checkpoint_of_another_trainer_is_refused(folder, tmp_path):
    def ppo(folder, **changes):
        return ppo_trainers.trainer("head", folder, **SAVES | dict(max_steps=1) | changes)

    points = {"GRPOTrainer": folder / "checkpoint-2"}
    for name, make in (("RewardTrainer", reward_run), ("PPOTrainer", ppo)):
        make(tmp_path / name, max_steps=1).train()
        points[name] = tmp_path / name / "checkpoint-1"
    makes = {"GRPOTrainer": trainer, "RewardTrainer": reward_run, "PPOTrainer": ppo}
    for (name, point), (own, make) in product(points.items(), makes.items()):
        if name != own:
            with pytest.raises(ConfigError, match=rf"is of {name}, and this is {own}. Give the folder as the model"):
                make(tmp_path / "out").train(resume_from_checkpoint=str(point))


def test_weights_alone_are_no_checkpoint_to_resume_from(tmp_path):
    reward_run(tmp_path, save_only_model=True).train()
    with pytest.raises(ConfigError, match=r"was saved with save_only_model: .* Give the folder as the model"):
        reward_run(tmp_path).train(resume_from_checkpoint=True)


def test_a_learning_rate_that_the_checkpoint_brings_along_is_told(tmp_path, caplog):
    constant = dict(lr_scheduler_type="constant", logging_steps=1)
    reward_run(tmp_path, **constant).train()
    again = reward_run(tmp_path, learning_rate=5e-4, max_steps=3, **constant)
    again.train(resume_from_checkpoint=True)
    said = reward_trainers.warnings_of(caplog)
    assert "learning_rate is 0.0005, but the checkpoint's 0.001 goes on: optimizers restore it." in said
    assert "max_steps was 2 and is 3: the new value counts from here on." in said
    assert again.state.global_step == 3
    assert [log["learning_rate"] for log in again.state.log_history if "learning_rate" in log] == [1e-3] * 3


def test_the_frozen_weights_under_an_adapter_are_part_of_the_run(tmp_path):
    def lora(seed, **changes):
        config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear")
        return reward_run(tmp_path, model=ppo_trainers.classifier(seed), peft_config=config, **changes)

    lora(0, max_steps=1).train()
    lora(0).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"model.frozen was .* and is"):
        lora(1).train(resume_from_checkpoint=True)


def test_operational_settings_are_free(run, folder):
    """Nothing is said of settings that run a training, and how micro-batches go through a model changes rounding."""
    changes = dict(logging_steps=2, save_steps=2, packing=False, save_total_limit=3, run_name="other")
    again = resumed(folder, save_on_signal=False, **changes)
    assert distance(trained_weights(again), run[1]) < 1e-6


# What moves outside the policy ---------------------------------------------------------------------------------------

MOVING = dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
# Trainers and settings. A stream begins anew after step 4.
MOVES = {
    "the reference": ("grpo", lambda: MOVING),
    "a stream of prompts": ("grpo", lambda: dict(rows=ppo_trainers.prompts(6).to_iterable_dataset())),
    "a stream of pairs": ("reward", lambda: dict(rows=jobs.pairs().select(range(34)).to_iterable_dataset())),
    "a stream of prompts of PPO": ("ppo_head", lambda: dict(rows=ppo_trainers.prompts(16).to_iterable_dataset())),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_outside_the_policy_goes_on_where_it_stood(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, settings = MOVES[name]
    whole = forks.run(jobs.trainer(kind, save_steps=5, **settings()))
    again = forks.resume(jobs.trainer(kind, save_strategy="no", **settings()), "out/checkpoint-5")
    assert jobs.differences(whole, again) == []


def test_a_reference_that_cannot_move_or_is_not_in_the_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs.trainer("grpo", max_steps=1).train()
    words = r"checkpoint-1 has no reference.safetensors, from which sync_ref_model=True"
    with pytest.raises(ConfigError, match=words):
        jobs.trainer("grpo", **MOVING).train(resume_from_checkpoint=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"FSDP1 flattens them"):
        jobs.trainer("grpo", **MOVING)


@pytest.mark.parametrize(
    ("before", "after", "step"), [(False, True, 1), (True, False, 2), nightly(False, True, 2), nightly(True, False, 1)]
)
def test_vllm_that_is_turned_on_or_off_between_rollouts_generates_again(before, after, step, tmp_path, monkeypatch):
    def made(name, use_vllm):
        vllm = dict(use_vllm=True, vllm_mode="server") if use_vllm else {}
        return trainer(tmp_path / name, gradient_accumulation_steps=1, steps_per_generation=2, max_steps=4, **vllm)

    servers = sampling_servers.install(monkeypatch)
    made("before", before).train()
    again, read = made("after", after), []
    compute = again._compute_loss
    monkeypatch.setattr(again, "_compute_loss", lambda model, inputs: read.append(inputs) or compute(model, inputs))
    again.train(resume_from_checkpoint=str(tmp_path / "before" / f"checkpoint-{step}"))
    assert again.state.global_step == 4
    assert {("sampling_per_token_logps" in one) for one in read} == {after}
    assert not after or "generate" in dict(servers.last.events)


# Persistent workers draw a number where they begin, once in a run: a resumed run begins them again.
KEPT_WORKERS = dict(dataloader_num_workers=1, dataloader_persistent_workers=True, eval_strategy="steps", eval_steps=2)


@pytest.mark.parametrize("kind", daily(["grpo", "reward", "ppo_head"], "grpo"))
def test_persistent_workers_draw_no_number_a_second_time(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = jobs.pairs().select(range(12)) if kind == "reward" else jobs.prompts(4 if kind == "grpo" else 16)
    own = dict(num_generations_eval=2) if kind == "grpo" else {}

    def made():
        settings = dict(max_steps=4, save_total_limit=None, rows=rows, eval_dataset=rows.select(range(2)))
        return jobs.trainer(kind, per_device_eval_batch_size=2, **KEPT_WORKERS | settings | own)

    whole = made()
    whole.train()
    expected = jobs.outcome(whole)
    saved = shutil.copytree(jobs.OUTPUT_DIR, tmp_path / "saved")
    for step in (1, 3):  # before the first evaluation, and after it
        shutil.rmtree(jobs.OUTPUT_DIR)
        point = shutil.copytree(saved / f"checkpoint-{step}", Path(jobs.OUTPUT_DIR, f"checkpoint-{step}"))
        again = made()
        again.train(resume_from_checkpoint=str(point))
        assert jobs.differences(expected, jobs.outcome(again)) == [], f"from step {step}"


# transformers evaluates at the end of an epoch, after the checkpoint of its last step, and not again in a resumed run.
DRAWING = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", lora_dropout=0.1)
EVALUATED = {
    "grpo": dict(num_generations_eval=2),
    "reward": dict(peft_config=DRAWING, disable_dropout=False),
    "ppo_head": {},
}


@pytest.mark.parametrize("kind", daily(EVALUATED, "grpo", "reward"))
def test_an_evaluation_leaves_training_its_random_numbers(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = jobs.pairs().select(range(16)) if kind == "reward" else jobs.prompts(4 if kind == "grpo" else 16)

    def made(**evaluation):
        settings = dict(max_steps=5, save_total_limit=None, rows=rows, eval_dataset=rows.select(range(2)))
        return jobs.trainer(kind, per_device_eval_batch_size=2, **settings | EVALUATED[kind] | evaluation)

    plain = made(eval_strategy="no", save_strategy="no")
    plain.train()
    whole = made(eval_strategy="epoch")
    whole.train()
    evaluated_at = [log["step"] for log in whole.state.log_history if "eval_runtime" in log]
    assert evaluated_at[0] < 5
    assert distance(trained_weights(whole), trained_weights(plain)) == 0
    for step in range(evaluated_at[0] + 1, 6):
        shutil.rmtree(f"{jobs.OUTPUT_DIR}/checkpoint-{step}", ignore_errors=True)
    again = made(eval_strategy="epoch")
    again.train(resume_from_checkpoint=f"{jobs.OUTPUT_DIR}/checkpoint-{evaluated_at[0]}")
    assert distance(trained_weights(whole), trained_weights(again)) == 0
    assert jobs.differences(jobs.outcome(whole), jobs.outcome(again)) == []

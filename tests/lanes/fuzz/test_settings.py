"""Every field of the three configs with six odd values, through the scripts: one sentence, or training that is right.

Fields are those of the dataclasses, so that a new one joins by itself, and the values follow from their types alone:
each run asks the same. A value is tried in a fork of a process in which everything is imported, with a limit of time
and of memory. `-k "ppo and score_clip"` repeats one field; the last line of each trainer counts what became of all.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import sys
import types
import typing
from collections import Counter

import pytest
import yaml
from safetensors import safe_open
from transformers import TrainerCallback

from tests import tiny
from tests.faults import forks
from trl_ext import GRPOConfig, PPOConfig, RewardConfig, trainers
from trl_ext.scripts import grpo, ppo, reward

SCRIPTS = {"grpo": (grpo, GRPOConfig), "ppo": (ppo, PPOConfig), "reward": (reward, RewardConfig)}
LIMIT_S = 90.0  # a run takes one or two
MEMORY_BYTES = 24 << 30  # of addresses, not of memory: an absurd size is then an error, and not the machine's end
NAN, INF = math.nan, math.inf
# By the first type of a field that is not None.
VALUES = {
    bool: (True, False, 2, "maybe", [True], {}),
    int: (-1, 0, 10**9, 0.5, "word", NAN),
    float: (-1.0, 0.0, 1e30, NAN, INF, "word"),
    str: ("", "nonsense", 7, ["nonsense"], "a\0b", "x" * 5000),
    list: ([], "word", ["nonsense"], [NAN], 7, {"a": 1}),
    dict: ({}, {"nonsense": 1}, {"": None}, [1], 7, "word"),
}
COMMON = dict(
    max_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    per_device_train_batch_size=4,
)
ROLLOUT = dict(reward_funcs=["tests.ppo_trainers.reward"], max_completion_length=4)
SETTINGS = {"grpo": {**COMMON, **ROLLOUT, "num_generations": 2}, "ppo": {**COMMON, **ROLLOUT}, "reward": COMMON}
TRAINED, REFUSED, FAILED = "trained", "refused in a sentence", "failed"


def kind_of(hint):
    """Return the type among the keys of VALUES that a field's type begins with; text for all others."""
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]
    for arm in arms:
        plain = typing.get_origin(arm) or arm
        if plain in VALUES:
            return plain
    return str


def fields():
    for trainer, (_, config) in SCRIPTS.items():
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.init:
                yield pytest.param(trainer, field.name, kind_of(hints[field.name]), id=f"{trainer}-{field.name}")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model with two kinds of data, in a process that can be forked."""
    forks.prepare()
    folder = tmp_path_factory.mktemp("assets")
    tiny.model("llama").save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    prompts = [{"prompt": tiny.words(i, i + 1)} for i in range(3, 11)]
    pairs = [{**row, "chosen": tiny.words(3), "rejected": tiny.words(4, 5)} for row in prompts]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("grpo", "reward", "ppo"):  # scripts import them late
        __import__(f"{trainers.__name__}.{name}.trainer")
    return folder


@pytest.fixture(scope="module")
def counts(request):
    """Count endings by trainer, and print them at the end."""
    found: dict[str, Counter] = {}
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for trainer, ends in found.items():
            each = ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))
            print(f"\n{trainer}: {ends.total()} values of {ends.total() // 6} fields: {each}", end="")


class StopsSoon(TrainerCallback):
    """Ends a run that would take days as asked."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= 2


def train(trainer):
    """Run the script on the recipe of the working folder; return what it wrote, if that is a model."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # pytest's are elsewhere
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiler takes minutes, and is not ours
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    SCRIPTS[trainer][0].main(["--config", "recipe.yaml"], [StopsSoon()])
    return {}


def what_is_wrong(ending, folder):
    """Return why an ending is none that a user should see; empty for a sentence, and for a run that is right."""
    if ending.code == forks.HUNG:
        return f"did not end in {LIMIT_S:.0f} s"
    if "Traceback" in ending.log:
        return "a traceback"
    if ending.code in (2, 5):
        sentences = re.findall(r"^error: (.+)\n\n", ending.log, re.MULTILINE)
        return "" if len(sentences) == 1 else f"{len(sentences)} sentences"
    if ending.code:
        return f"exit code {ending.code}"
    states = list(folder.rglob("trainer_state.json"))
    if not states:
        return "no state was written"
    history = json.loads(states[0].read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if not all(map(math.isfinite, losses)):
        return f"losses of {losses}"
    for file in folder.rglob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():
                if not weights.get_tensor(name).isfinite().all():
                    return f"{name} has weights that are no numbers"
    return ""


@pytest.mark.parametrize(("trainer", "name", "kind"), fields())
def test_an_odd_value_is_a_sentence_or_trains_right(trainer, name, kind, assets, counts, tmp_path):
    rows = "pairs" if trainer == "reward" else "prompts"
    given = {"model_name_or_path": str(assets / "model"), "dataset_name": str(assets / f"{rows}.jsonl")}
    failed = []
    for value in VALUES[kind]:
        recipe = {**SETTINGS[trainer], **given, "output_dir": "out", name: value}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        ending = forks.in_fork(tmp_path, lambda: train(trainer), LIMIT_S)
        wrong = what_is_wrong(ending, tmp_path)
        end = FAILED if wrong else REFUSED if ending.code else TRAINED
        counts.setdefault(trainer, Counter())[end] += 1
        if wrong:
            failed.append(f"{name}={str(value)[:40]!r}: {wrong}\n{ending.log[-1500:]}")
        for left in tmp_path.iterdir():
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        assert os.getcwd() != str(tmp_path)
    assert not failed, "\n\n".join(failed)

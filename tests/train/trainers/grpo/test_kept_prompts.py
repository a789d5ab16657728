"""A prompt that goes through the model once for all forwards of its group in a step: weights are TRL's, to 1e-6."""

import random

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import trl_ext
from tests import tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE, trainer, weights
from tests.nightly import nightly
from trl_ext.memory.formulas.activations import kept_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.packing import step_plan
from trl_ext.packing.prefix_cache import PrefixCache

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CASES = {
    "llama": dict(beta=0.1, num_iterations=2),
    "gemma3": dict(gradient_checkpointing=True),
    "deepseek_v3": dict(loss_type="dapo"),
    "qwen3": dict(peft_config=LORA, gradient_checkpointing=True),
    "mistral_window": dict(loss_type="dr_grpo", max_tokens_per_forward=150),
}


def prompts(length: int = 110) -> Dataset:
    """Eight prompts of so many words, and of a few."""
    draw = random.Random(1)
    lengths = [length, length, 3, length // 2] * 2
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(n))) for n in lengths]
    return Dataset.from_dict({"prompt": rows})


def trained(folder, library, **changes):
    settings = dict(per_device_train_batch_size=2, num_generations=8, gradient_accumulation_steps=16, max_steps=2)
    if library is trl:
        changes.pop("max_tokens_per_forward", None)
    subject = trainer(folder, library, data=prompts(), **settings | changes)
    subject.train()
    return subject


def forwarded(subject) -> float:
    return sum(
        log["packing/forwarded_tokens"] for log in subject.state.log_history if "packing/forwarded_tokens" in log
    )


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """What a call costs is of models that are larger than these."""
    monkeypatch.setattr(step_plan, "CALL_COST", 8)


@pytest.mark.parametrize("family", ["llama", *(nightly(name) for name in CASES if name != "llama")])
def test_weights_are_those_of_trl(family, tmp_path, monkeypatch):
    of_trl = trained(tmp_path / "trl", trl, model=family, **CASES[family])
    kept = trained(tmp_path / "kept", trl_ext, model=family, **CASES[family])
    assert (weights(of_trl) - weights(kept)).abs().max() <= WEIGHT_TOLERANCE
    monkeypatch.setattr(step_plan, "CALL_COST", 10**9)
    again = trained(tmp_path / "again", trl_ext, model=family, **CASES[family])
    assert forwarded(kept) < 0.75 * forwarded(again)
    assert (weights(again) - weights(kept)).abs().max() <= WEIGHT_TOLERANCE


def test_the_planned_bytes_are_those_that_are_kept(tmp_path, monkeypatch):
    """Of the keys and values of all layers, and of their gradients; the rehearsal keeps as many."""
    found, rehearsed = [], []
    clear = PrefixCache.clear

    def counted(cache):
        leaves = [leaf for pair in cache._leaves.values() for leaf in pair]
        if leaves and all(leaf.grad is not None for leaf in leaves):
            (found if subject.state.global_step else rehearsed).append(sum(2 * leaf.nbytes for leaf in leaves))
        clear(cache)

    monkeypatch.setattr(PrefixCache, "clear", counted)
    settings = dict(num_generations=8, gradient_accumulation_steps=16, per_device_train_batch_size=2)
    subject = trainer(tmp_path, data=prompts(), memory_rehearsal=True, **settings)
    subject.train()
    job = Job(
        "grpo", max_prompt_length=111, max_completion_length=12, num_generations=8, per_device_train_batch_size=2
    )
    in_float32 = 2 * kept_bytes(find_shape(subject.model.config.to_dict()), job)
    assert max(found) == pytest.approx(in_float32, rel=0.03)
    assert max(rehearsed) == pytest.approx(in_float32, rel=0.03)


class GradientsAlive(TorchDispatchMode):
    """Counts gradients of weights of a shape that are there at the same time; each is the result of one product."""

    def __init__(self, shape):
        super().__init__()
        self._shape, self._alive, self.most = shape, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape == self._shape:
            self._alive = [one for one in self._alive if not one.expired()] + [
                StorageWeakRef(result.untyped_storage())
            ]
            self.most = max(self.most, len(self._alive))
        return result


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_no_second_set_of_gradients_is_there(gradient_checkpointing, tmp_path, monkeypatch):
    def most_alive(folder):
        options = dict(per_device_train_batch_size=2, num_generations=8, gradient_accumulation_steps=16, max_steps=1)
        subject = trainer(folder, data=prompts(), gradient_checkpointing=gradient_checkpointing, **options)
        with GradientsAlive(subject.model.model.layers[0].mlp.up_proj.weight.shape) as alive:
            subject.train()
        return alive.most, forwarded(subject)

    kept, fewer_tokens = most_alive(tmp_path / "kept")
    monkeypatch.setattr(step_plan, "CALL_COST", 10**9)
    again, tokens = most_alive(tmp_path / "again")
    assert fewer_tokens < tokens
    assert kept == again == 2 * tiny.model("llama").config.num_hidden_layers + 1  # of gate and up, and one that is new

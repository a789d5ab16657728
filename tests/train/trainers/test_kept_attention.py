"""Checkpointed layers that keep the output of attention: gradients of checkpointing to the bit, and fewer calls."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.nightly import daily, nightly
from tests.preferences import reward_model
from trl_ext.errors import ConfigError
from trl_ext.packing import attention

TRAINERS = {
    "grpo": grpo_trainers.trainer,
    "adapter": partial(ppo_trainers.trainer, "adapter"),
    "separate": partial(ppo_trainers.trainer, "separate"),
    "reward": reward_trainers.trainer,
}
FULL, KEPT = {"use_reentrant": False}, {"keep_attention": True}


class Calls(TorchDispatchMode):
    """Counts forwards of attention's operation on a processor."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **kwargs or {})


def trained(kind: str, folder: Any, options: dict | None, family: str, dtype: torch.dtype, **settings: Any):
    """The weights after two steps, how far they moved, and the calls of attention."""
    folder.mkdir()
    model = reward_model(folder / "model", family) if kind == "reward" else tiny.model(family)
    if kind not in ("adapter", "separate"):
        settings["model"] = model.to(dtype)
    checkpointing = dict(gradient_checkpointing=options is not None, gradient_checkpointing_kwargs=options)
    subject = TRAINERS[kind](folder, **checkpointing, max_steps=2, packing=True, **settings)
    before = grpo_trainers.weights(subject)
    with Calls() as calls:
        subject.train()
    after = grpo_trainers.weights(subject)
    return after, (after - before).abs().max(), calls.num


@pytest.mark.parametrize("merges", daily([False, True], True), ids=["copies", "merged"])
@pytest.mark.parametrize(
    ("kind", "family", "dtype"),
    [
        ("grpo", "llama", torch.float32),
        ("grpo", "qwen3", torch.bfloat16),
        nightly("grpo", "mistral_window", torch.float32),
        nightly("grpo", "gemma3", torch.bfloat16),
        ("adapter", "llama", torch.float32),
        nightly("separate", "llama", torch.float32),
        ("reward", "llama", torch.float32),
    ],
)
def test_gradients_are_those_of_checkpointing_to_the_bit(kind, family, dtype, merges, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "merging_pays", lambda *_: merges and family not in ("mistral_window", "gemma3"))
    full, moved, num_full = trained(kind, tmp_path / "full", FULL, family, dtype)
    kept, _, num_kept = trained(kind, tmp_path / "kept", KEPT, family, dtype)
    _, _, num_plain = trained(kind, tmp_path / "plain", None, family, dtype)
    assert moved > 1e-5, "nothing was learned, so nothing is compared"
    assert torch.equal(kept, full)
    assert num_kept == num_plain < num_full, "attention is computed again"


def test_prompts_that_are_kept_and_layers_that_are_skipped_go_with_it(tmp_path):
    settings = dict(max_tokens_per_forward=32)
    for number, more in enumerate(({}, {"every_n_layers": 2})):
        full, moved, _ = trained("grpo", tmp_path / f"full{number}", FULL | more, "llama", torch.float32, **settings)
        kept, _, _ = trained("grpo", tmp_path / f"kept{number}", KEPT | more, "llama", torch.float32, **settings)
        assert moved > 1e-5 and torch.equal(kept, full)


def test_what_was_kept_is_gone_after_the_backward(tmp_path, monkeypatch):
    """A kept output that held its own graph would stay until the garbage collector comes."""
    import gc
    import weakref

    from trl_ext.packing import recompute

    made = []

    class Seen(recompute.KeptAttention):
        def __init__(self):
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr(recompute, "KeptAttention", Seen)
    gc.collect()
    gc.disable()
    try:
        trained("grpo", tmp_path / "kept", KEPT, "llama", torch.float32)
        assert made and not any(one() for one in made)
    finally:
        gc.enable()


REFUSED = (
    dict(gradient_checkpointing_kwargs=KEPT | {"use_reentrant": True}),
    dict(gradient_checkpointing_kwargs=KEPT, packing=False),
    dict(gradient_checkpointing_kwargs=KEPT, gradient_checkpointing=False),
)


@pytest.mark.parametrize("settings", REFUSED)
@pytest.mark.parametrize("kind", ["grpo", "separate", "reward"])
def test_where_it_cannot_work_it_is_refused(kind, settings, tmp_path):
    with pytest.raises(ConfigError, match="needs gradient_checkpointing: true, use_reentrant: false, and packing"):
        TRAINERS[kind](tmp_path, **{"gradient_checkpointing": True} | settings)

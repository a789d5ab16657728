"""Fused layer kernels are in the model that the self-check checks, and only where all its numbers stay."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.utils import is_liger_kernel_available

from tests import grpo_trainers, layer_kernels, ppo_trainers, reward_trainers, tiny
from tests.nightly import daily
from tests.preferences import reward_model
from trl_ext.errors import ConfigError
from trl_ext.monitor.summary import summarize, token_rows
from trl_ext.trainers.base import packing
from trl_ext.trainers.base.packing import PackingSwitch

pytestmark = pytest.mark.own_self_check

ROPE = modeling_llama.apply_rotary_pos_emb
TRAINERS = {
    "grpo": grpo_trainers.trainer,
    "ppo": partial(ppo_trainers.trainer, "separate"),
    "reward": reward_trainers.trainer,
}


@pytest.fixture(autouse=True)
def _liger_is_looked_for_again():
    yield
    is_liger_kernel_available.cache_clear()


def trainer(kind, folder, family="llama", **settings):
    model = reward_model(folder / "model", family) if kind == "reward" else tiny.model(family)
    return TRAINERS[kind](folder, model=model, **dict(max_steps=2, logging_steps=1) | settings)


def learned(subject) -> torch.Tensor:
    before = grpo_trainers.weights(subject)
    subject.train()
    after = grpo_trainers.weights(subject)
    assert (after - before).abs().max() > 1e-5, "nothing was learned, so nothing is compared"
    return after


def kernels_row(subject) -> str:
    return dict(row[:2] for row in token_rows(summarize(subject.state.log_history)))["kernels"]


def has_kernels(subject) -> bool:
    replaced = ["forward" in vars(one) for model in subject._models() for one in model.modules() if norm_or_mlp(one)]
    assert len(set(replaced)) == 1, "in some layers only"
    assert replaced[0] == (modeling_llama.apply_rotary_pos_emb is not ROPE)
    return replaced[0]


def norm_or_mlp(module) -> bool:
    return type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP")


@pytest.mark.parametrize("kind", TRAINERS)
def test_kernels_that_compute_the_same_are_in_before_the_first_step(kind, tmp_path, monkeypatch):
    expected = learned(trainer(kind, tmp_path / "plain"))
    kernels = layer_kernels.install(tmp_path, monkeypatch)
    subject = trainer(kind, tmp_path, layer_kernels=True)
    assert has_kernels(subject) and subject._packs
    in_check = kernels.NUM_FORWARDS[0]
    assert in_check > 0, "the self-check checks another model"
    assert (learned(subject) - expected).abs().max() <= 1e-5
    assert kernels.NUM_FORWARDS[0] > in_check
    assert kernels_row(subject) == "attention: sdpa by segments (flash), long shared prompts merged; layers: Liger's"


@pytest.mark.parametrize("fault", daily(["wrong", "leaks", "raises"], "leaks"))
def test_kernels_that_compute_something_else_are_taken_out_and_packing_stays(fault, tmp_path, monkeypatch, caplog):
    expected = learned(trainer("grpo", tmp_path / "plain"))
    kernels = layer_kernels.install(tmp_path, monkeypatch, fault)
    as_on_a_card(monkeypatch)
    subject = trainer("grpo", tmp_path)
    assert len(kernels.CALLS) == 1 and not has_kernels(subject) and subject._packs
    assert "offset" not in vars(subject.model.model.norm)
    (said,) = [text for text in reward_trainers.warnings_of(caplog) if "layer_kernels" in text]
    assert "Fused layer kernels are off" in said
    assert torch.equal(learned(subject), expected)
    assert "layers: transformers' own (" in kernels_row(subject)
    with pytest.raises(ConfigError, match="layer_kernels=True, but LlamaForCausalLM has no fused layer kernels: "):
        trainer("grpo", tmp_path / "asked", layer_kernels=True, packing=True)


def as_on_a_card(monkeypatch):
    """The setting's default, as it is on a card."""
    monkeypatch.setattr(packing, "TAKEN_UNASKED", ("cpu",))


@pytest.mark.parametrize(
    ("family", "settings", "is_installed", "why"),
    [
        ("llama", {}, False, "transformers' own (liger-kernel is not installed)"),
        ("qwen2", {}, True, "transformers' own (liger-kernel has none for qwen2)"),
        ("llama", dict(layer_kernels=False), True, "transformers' own"),
    ],
)
def test_where_there_are_none_the_summary_says_so_and_nothing_warns(
    family, settings, is_installed, why, tmp_path, monkeypatch, caplog
):
    if is_installed:
        layer_kernels.install(tmp_path, monkeypatch)
    as_on_a_card(monkeypatch)
    subject = trainer("grpo", tmp_path, family, **settings)
    assert subject._packs and subject.layer_kernels == why
    assert not reward_trainers.warnings_of(caplog)


@pytest.mark.parametrize("which", ["cannot put them in", "computes something else"])
def test_another_process_that_cannot_use_them_decides_for_all(which, tmp_path, monkeypatch):
    layer_kernels.install(tmp_path, monkeypatch)
    as_on_a_card(monkeypatch)
    # Whether some process found fault with: packing; putting them in; packing with them; the numbers with them.
    elsewhere = iter([False, True] if which == "cannot put them in" else [False, False, False, True])
    monkeypatch.setattr(PackingSwitch, "_is_on_any_rank", lambda self, here: here or next(elsewhere))
    subject = trainer("grpo", tmp_path)
    assert subject._packs and not has_kernels(subject)
    assert subject.layer_kernels == "transformers' own (they cannot be used in another process)"


def test_on_a_processor_nothing_is_replaced_unasked(tmp_path, monkeypatch):
    kernels = layer_kernels.install(tmp_path, monkeypatch)
    assert not has_kernels(trainer("grpo", tmp_path)) and not kernels.CALLS


def test_quantized_weights_have_none(tmp_path, monkeypatch):
    kernels = layer_kernels.install(tmp_path, monkeypatch)
    as_on_a_card(monkeypatch)
    model = tiny.model("llama")
    model.hf_quantizer = SimpleNamespace(is_trainable=True)
    subject = grpo_trainers.trainer(tmp_path, model=model)
    assert subject.layer_kernels == "transformers' own (the weights are quantized)" and not kernels.CALLS


def test_transformers_own_setting_is_checked_too(tmp_path, monkeypatch):
    """transformers puts the kernels in when training begins, which is after the self-check."""
    layer_kernels.install(tmp_path, monkeypatch)
    assert has_kernels(trainer("reward", tmp_path, use_liger_kernel=True))
    layer_kernels.install(tmp_path / "wrong", monkeypatch, "wrong")
    with pytest.raises(ConfigError, match="use_liger_kernel=True, but "):
        trainer("reward", tmp_path / "wrong", use_liger_kernel=True)

"""Models that ask for flash-attention, or for a kernel from the hub, are trained packed, and as under sdpa."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.flash_attention import FlashAttention
from tests.nightly import nightly
from tests.preferences import reward_model
from trl_ext.errors import PackingError
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.summary import summarize, token_rows
from trl_ext.trainers.base import packing

pytestmark = pytest.mark.own_self_check

# Its rows are longer than its window.
FAMILY = "mistral_window"
FROM_HUB = "kernels-community/flash-attn3"


def grpo(folder, model):
    settings = dict(packing=True, max_steps=1, data=ppo_trainers.prompts(4))
    return grpo_trainers.trainer(folder, model=model, **settings)


def trained(kind: str, folder: Path, attention: str) -> torch.Tensor:
    """The weights after a step, minus those before."""
    folder.mkdir()
    model = reward_model(folder / "model", FAMILY) if kind == "reward" else tiny.model(FAMILY)
    model.config._attn_implementation = attention
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    makes = dict(grpo=grpo, ppo=partial(ppo_trainers.trainer, "head"), reward=reward_trainers.trainer)
    options = {} if kind == "grpo" else dict(max_steps=1, packing=True)
    subject = makes[kind](folder, model=model, **options)
    subject.train()
    assert subject._packs
    assert model.config._attn_implementation == attention
    after = dict(model.named_parameters())  # PPO adds a value head
    return torch.cat([(after[name].detach() - value).flatten() for name, value in before.items()])


@pytest.fixture
def kernel_from_hub() -> None:
    """What transformers registers when it has loaded the kernel."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        plain = interface._global_mapping["flash_attention_2"]
        interface.register(FROM_HUB, getattr(plain, "plain", plain))


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("grpo", "flash_attention_2"),
        nightly("grpo", "flash_attention_3"),
        ("grpo", FROM_HUB),
        ("ppo", "flash_attention_2"),
        ("reward", "flash_attention_2"),
    ],
)
def test_flash_attention_is_packed_and_trains_the_weights_of_sdpa(
    kind, attention, tmp_path, monkeypatch, kernel_from_hub
):
    expected = trained(kind, tmp_path / "sdpa", "sdpa")
    flash = FlashAttention(monkeypatch)
    found = trained(kind, tmp_path / "flash", attention)
    assert expected.abs().max() > 1e-5, "nothing was learned, so nothing is compared"
    assert flash.num_packed > 0
    assert (found - expected).abs().max() <= 1e-6


def test_a_kernel_that_the_hub_does_not_give_is_one_sentence(tmp_path, monkeypatch, kernel_from_hub):
    def lookup(name: str) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("trl_ext.packing.attention.flash_varlen_function", lookup)
    model = tiny.model(FAMILY)
    model.config._attn_implementation = FROM_HUB
    with pytest.raises(PackingError, match="couldn't connect to the hub"):
        grpo(tmp_path, model)


VARLEN = "PyTorch's varlen kernel, long shared prompts merged"


@pytest.mark.parametrize(
    ("major", "attention", "asked", "way"),
    [
        (9, VARLEN, "sdpa", "kernels-community/flash-attn3; or pip install flash-attn-4"),
        (10, VARLEN, "sdpa", "flash-attention 4 would be faster on this card for long rows: pip install flash-attn-4"),
        (10, "flash_attention_2", "flash_attention_2", "attn_implementation: flash_attention_4"),
        (8, VARLEN, "sdpa", None),
        (12, VARLEN, "sdpa", None),
        (9, "flash_attention_3", "flash_attention_3", None),
        (10, VARLEN, "flash_attention_4", None),
        (9, "sdpa by segments (math)", "sdpa", None),
    ],
)
def test_the_report_names_the_attention_that_would_be_faster(major, attention, asked, way, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "capability_of", lambda device: major)
    monkeypatch.setattr(packing, "kernels_in_words", lambda *_, **__: attention)
    subject = grpo(tmp_path, tiny.model(FAMILY))
    subject.model.config._attn_implementation = asked
    subject.log({"reward": 1.0})
    said = dict(row[:2] for row in token_rows(summarize(subject.state.log_history)))
    assert said["kernels"].startswith(f"attention: {attention}; layers: ")
    assert ("would be faster" in said) == (way is not None) and (way or "") in said.get("would be faster", "")
    write_report(tmp_path, subject.state.log_history)
    assert ("faster on this card" in (tmp_path / "report.html").read_text()) == (way is not None)

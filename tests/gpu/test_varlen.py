"""On a CUDA card: in float32 packed rows are each row alone; in bfloat16 varlen kernels are no worse than twice the
padded path, and leak nothing."""

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.batches import RAGGED, alone, batch, gradient, packed_logits
from tests.gpu.card import DEVICE, MARKS, ON_CARD, needs_card
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.compat.torch import has_varlen_attn
from trl_ext.packing import attention, kernels

pytestmark = MARKS
# Of log-probabilities (absolute) and of gradients (relative) in float32: sums in another order, over a vocabulary.
ROUNDING = 1e-5


def on_card(given):
    return type(given)(given.rows, given.input_ids.to(DEVICE), given.attention_mask.to(DEVICE), given.width)


def errors(
    family, tmp_path, packing: bool, bf16: bool = True, attention: str = "sdpa", **changes
) -> tuple[float, float]:
    """Root mean square error of log-probs, relative error of gradients, against each row alone in float32."""
    reference = tiny.model(family).to(DEVICE)
    expected, _ = alone(reference, RAGGED)
    weights = RAGGED.weights().to(DEVICE)
    expected_gradient = gradient(reference, (expected * weights).sum())
    policy = tiny.model(family)
    policy.set_attn_implementation(attention)
    subject = GRPOTrainer(
        policy,
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(str(tmp_path), bf16=bf16, use_cpu=not ON_CARD, report_to="none", packing=packing, **changes),
        Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 8}),
        processing_class=tiny.tokenizer(),
    )
    subject.model.train()
    given = on_card(RAGGED)
    logps, _, _ = subject._get_per_token_logps_and_entropies(
        subject.model, given.input_ids, given.attention_mask, given.width
    )
    ours = gradient(subject.model, (logps * weights).sum())
    error = (logps - expected).square().mean().sqrt().item()
    return error, ((ours - expected_gradient).norm() / expected_gradient.norm()).item()


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_in_float32_packed_rows_are_each_row_alone(family, share_prompt, tmp_path):
    found = errors(family, tmp_path, packing=True, bf16=False, share_prompt=share_prompt)
    assert max(found) < ROUNDING


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_bfloat16_errors_are_at_most_twice_those_of_padding(family, share_prompt, tmp_path):
    packed = errors(family, tmp_path, packing=True, share_prompt=share_prompt)
    padded = errors(family, tmp_path, packing=False)
    assert packed[0] <= 2 * padded[0]
    assert packed[1] <= 2 * padded[1]


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_flash_attention_is_no_worse_than_twice_the_padded_path(family, version, tmp_path):
    pytest.importorskip({2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}[version])
    packed = errors(family, tmp_path, packing=True, attention=f"flash_attention_{version}")
    padded = errors(family, tmp_path, packing=False)
    assert packed[0] <= 2 * padded[0]
    assert packed[1] <= 2 * padded[1]


@needs_card
def test_the_varlen_kernel_is_the_one_that_runs():
    assert has_varlen_attn(DEVICE)
    kernel = kernels.choose_kernel("sdpa", DEVICE, torch.bfloat16, 64)
    assert kernel is kernels.varlen_attention


@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_no_leak_between_segments(family):
    model = tiny.model(family).to(DEVICE, torch.bfloat16).eval()
    attention.take_segments(model.config)
    given, changed = (on_card(batch((12, (6, 9, 4)), (7, (5, 5)))) for _ in range(2))
    changed.input_ids[1, -given.width :] = (changed.input_ids[1, -given.width :] + 1) % tiny.VOCAB
    segments, before = packed_logits(model, given)
    _, after = packed_logits(model, changed)
    for segment in segments:
        if segment.item != 1 or segment.is_prefix:
            span = slice(segment.start, segment.end)
            assert torch.equal(before[span], after[span])

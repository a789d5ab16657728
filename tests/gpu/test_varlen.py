"""On a CUDA card: PyTorch's varlen kernel in bfloat16 is no worse than twice the padded path, and leaks nothing."""

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.batches import RAGGED, alone, batch, gradient
from tests.tensor.packing.test_packed_attention import packed_logits
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.compat.torch import has_varlen_attn
from trl_ext.packing import attention, kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
CUDA = torch.device("cuda")


def on_card(given):
    return type(given)(given.rows, given.input_ids.to(CUDA), given.attention_mask.to(CUDA), given.width)


def errors(family, tmp_path, packing: bool, **changes) -> tuple[float, float]:
    """Root mean square error of log-probs, relative error of gradients, against each row alone in float32."""
    reference = tiny.model(family).to(CUDA)
    expected, _ = alone(reference, RAGGED)
    weights = RAGGED.weights().to(CUDA)
    expected_gradient = gradient(reference, (expected * weights).sum())
    subject = GRPOTrainer(
        tiny.model(family),
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(str(tmp_path), bf16=True, report_to="none", packing=packing, **changes),
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
def test_bfloat16_errors_are_at_most_twice_those_of_padding(family, share_prompt, tmp_path):
    packed = errors(family, tmp_path, packing=True, share_prompt=share_prompt)
    padded = errors(family, tmp_path, packing=False)
    assert packed[0] <= 2 * padded[0]
    assert packed[1] <= 2 * padded[1]


def test_the_varlen_kernel_is_the_one_that_runs():
    assert has_varlen_attn(CUDA)
    kernel = kernels.choose_kernel("sdpa", CUDA, torch.bfloat16, 64)
    assert kernel is kernels.varlen_attention


@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_no_leak_between_segments(family):
    model = tiny.model(family).to(CUDA, torch.bfloat16).eval()
    attention.take_segments(model.config)
    given, changed = (on_card(batch((12, (6, 9, 4)), (7, (5, 5)))) for _ in range(2))
    changed.input_ids[1, -given.width :] = (changed.input_ids[1, -given.width :] + 1) % tiny.VOCAB
    segments, before = packed_logits(model, given)
    _, after = packed_logits(model, changed)
    for segment in segments:
        if segment.item != 1 or segment.is_prefix:
            span = slice(segment.start, segment.end)
            assert torch.equal(before[span], after[span])

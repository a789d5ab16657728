"""On a CUDA card, in bfloat16: attention that keeps a prefix's keys once is as exact as with copies of them."""

from functools import partial

import pytest
import torch

from tests.gpu.card import DEVICE, MARKS, ON_CARD
from tests.lines import lines_of
from trl_ext.packing.kernels import choose_kernel, sdpa_attention, varlen_attention
from trl_ext.packing.merge import CpuKernel, VarlenKernel, merged_attention
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize

pytestmark = MARKS
HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 64
MERGED = partial(merged_attention, kernel=VarlenKernel() if ON_CARD else CpuKernel())
COPIED = varlen_attention if ON_CARD else sdpa_attention
SHAPES = {"a group": [(200, (70, 5, 130, 1))], "groups, and one alone": [(37, (9, 16)), (0, (21,)), (64, (3, 3, 3))]}


def results(attend, table, q, k, v, grad) -> list[torch.Tensor]:
    """Output, and the gradients of queries, keys and values."""
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*given, table, scale=HEAD_SIZE**-0.5, window=None)
    out.backward(grad)
    return [x.float() for x in (out.detach(), *(x.grad for x in given))]


# The heads by which 8 processes share the row: in one line, and in two of which each has half of the queries.
@pytest.mark.parametrize("heads_of_lines", [8, 28])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"llama, {shape}")
def test_errors_are_at_most_twice_those_of_copies(shape, heads_of_lines):
    items = [RowSize(i, prefix, own) for i, (prefix, owns) in enumerate(SHAPES[shape]) for own in owns]
    (row,) = plan_rows(items)
    draw = torch.Generator().manual_seed(0)
    tokens = -(-row.num_tokens // 8) * 8
    shapes = [(1, heads, tokens, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, generator=draw).to(DEVICE) for shape in [*shapes, (1, tokens, HEADS, HEAD_SIZE)]]
    q, k, v, grad = (x.bfloat16() for x in exact)
    for numbers, table in lines_of(row, 8, heads_of_lines, DEVICE):
        half = q[:, :, numbers], k, v, grad[:, numbers]
        expected = results(sdpa_attention, table, *(x.float() for x in half))
        ours, others = (results(attend, table, *half) for attend in (MERGED, COPIED))
        for name, merged, copied, truth in zip(("out", "dq", "dk", "dv"), ours, others, expected, strict=True):
            errors = [(found - truth).norm() / truth.norm() for found in (merged, copied)]
            assert errors[0] <= 2 * errors[1], name


def test_the_merging_kernel_is_the_one_that_runs_llama():
    kernel = choose_kernel("sdpa", DEVICE, torch.bfloat16, HEAD_SIZE, merging_pays=True)
    assert isinstance(kernel, partial) and kernel.func is merged_attention

"""Rows that several lines of processes attend for: what a line computes with its queries is what one process does."""

from functools import partial

import pytest
import torch

from tests.flash_attention import FlashAttention
from tests.lines import lines_of
from tests.tensor.packing.test_merge import row_of, varlen_pair_on_the_cpu  # noqa: F401
from trl_ext.packing import kernels
from trl_ext.packing.merge import CpuKernel, VarlenKernel, merged_attention
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.ulysses import SequenceGroup

torch.set_num_threads(1)
HEADS = {(2, 1): 2, (4, 6): 2, (8, 28): 2, (6, 28): 3, (3, 4): 3, (4, 7): 4, (16, 14): 8}  # S and H, and R
KERNELS = {
    "segments": kernels.sdpa_attention,
    "copies": partial(kernels.flash_attention, base="flash_attention_2"),
    "merged": partial(merged_attention, kernel=CpuKernel()),
    "merged varlen": partial(merged_attention, kernel=VarlenKernel()),
}


@pytest.mark.parametrize(("size", "heads"), HEADS)
def test_every_part_of_a_row_is_in_one_line(size, heads):
    lines = SequenceGroup(size, 0).lines(heads)
    assert len(lines) == HEADS[size, heads]
    assert sorted(part for line in lines for part in line) == list(range(size))
    assert len({len(line) for line in lines}) == 1


def test_lines_of_an_even_number_of_processes_see_equally_many_keys():
    (row,) = plan_rows([RowSize(0, 0, 8 * 30)])
    work = []
    for numbers, table in lines_of(row, 8, 28):
        work.append(sum(number + 1 for number in numbers))
        assert table.num_keys <= 1.75 * row.num_tokens
    assert max(work) == min(work)


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in KERNELS), ("segments", 9), ("copies", 9)])
def test_lines_compute_what_one_process_does(name, window, monkeypatch, varlen_pair_on_the_cpu):  # noqa: F811
    FlashAttention(monkeypatch)
    for seed, (size, num_heads) in enumerate([(2, 1), (4, 6), (3, 4), (8, 4)]):
        row = row_of(seed)
        draw = torch.Generator().manual_seed(seed)
        whole = -(-row.num_tokens // size) * size
        q, k, v = (torch.randn(1, heads, whole, 16, generator=draw).requires_grad_() for heads in (4, 2, 2))
        grad = torch.randn(1, whole, 4, 16, generator=draw)
        how = dict(scale=0.3, window=window)
        [(_, one_line)] = lines_of(row, size, size)
        expected_out = kernels.sdpa_attention(q, k, v, one_line, **how)
        expected = torch.autograd.grad(expected_out, (q, k, v), grad)
        total = [torch.zeros_like(x) for x in (q, k, v)]
        for numbers, table in lines_of(row, size, num_heads):
            out = KERNELS[name](q[:, :, numbers], k, v, table, **how)
            assert (out - expected_out[:, numbers]).norm() <= 1e-6 * expected_out[:, numbers].norm()
            for sum_, more in zip(total, torch.autograd.grad(out, (q, k, v), grad[:, numbers]), strict=True):
                sum_ += more
        for one, other in zip(total, expected, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()

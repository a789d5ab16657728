"""Convolutions and recurrences over trees of segments give each sequence what it gets alone, and its gradients."""

import random

import pytest
import torch
from torch.testing import assert_close
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests import state_kernels, tiny
from trl_ext.packing.families.recurrence import StateOrder
from trl_ext.packing.families.state import begin_anew
from trl_ext.packing.plan import Segment
from trl_ext.packing.table import SegmentTable

HEADS, SIZE, STATE = 2, 4, 3


def tree(draw: random.Random, num_segments: int) -> SegmentTable:
    """Segments of any length, one token too, each a root or behind any of those before it."""
    segments: list[Segment] = []
    for number in range(num_segments):
        parent = draw.choice([None, *range(number)])
        start = segments[-1].end if segments else 0
        offset = 0 if parent is None else segments[parent].num_keys
        segments.append(Segment(start, start + draw.choice([1, 2, 3, 7, 40, 70]), number, offset, parent))
    return SegmentTable(tuple(segments), torch.device("cpu"))


def keywords(order):
    """What a packed forward brings."""
    boundaries = {"cu_seq_lens_q": order.table.cu_seqlens, "seq_idx": order.number_of_sequence} if order else {}
    return boundaries | {"state_order": order}


def convolution(x, order=None):
    weight = torch.linspace(-1, 1, HEADS * SIZE * 4).view(HEADS * SIZE, 4)
    return modeling_qwen3_5.causal_conv1d_fn(x.flatten(2).mT, weight, activation="silu", **keywords(order)).mT


def rule(x, order=None):
    q, k, v = x, x.flip(-1), x.roll(1, -1)
    g, beta = -x[..., 0].square(), x[..., 1].sigmoid()
    given = {"use_qk_l2norm_in_kernel": True, **keywords(order)}
    given["cu_seqlens"] = given.pop("cu_seq_lens_q", None)
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **given)[0]


def scan(x, order=None):
    dt, A = x[..., 0], -torch.tensor([0.3, 1.0])
    B, C = x[:, :, :1, :STATE], x[:, :, 1:, :STATE]
    # As in Nemotron-H no step is shorter than some time, so that padding needs steps of its own.
    options = {"dt_bias": torch.full((HEADS,), -2.0), "dt_softplus": True, "dt_limit": (0.01, float("inf"))}
    return modeling_bamba.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=16, D=torch.ones(HEADS), **options, **keywords(order)
    )


@pytest.fixture(autouse=True)
def dispatched():
    for family in ("qwen3_5", "bamba"):
        assert begin_anew(tiny.model(family))


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("function", [convolution, rule, scan])
@pytest.mark.parametrize("seed", range(4))
def test_each_token_gets_what_it_gets_in_its_sequence_alone(function, seed, with_kernels, monkeypatch):
    if with_kernels:
        for modeling in (modeling_qwen3_5, modeling_bamba):
            state_kernels.install(monkeypatch, modeling)
        for family in ("qwen3_5", "bamba"):
            begin_anew(tiny.model(family))
    table = tree(random.Random(seed), 2 + 3 * seed)
    torch.manual_seed(seed)
    x = torch.randn(1, table.segments[-1].end, HEADS, SIZE).requires_grad_()
    found = function(x, StateOrder(table))
    weights = torch.randn_like(found)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    parts = []
    for number, chain in enumerate(table.chains):
        whole = torch.cat([x[:, table.segments[i].start : table.segments[i].end] for i in chain], dim=1)
        parts.append(function(whole)[:, table.segments[number].offset :])
    expected = torch.cat(parts, dim=1)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), x)
    assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert_close(gradient, theirs, atol=1e-5, rtol=1e-4)

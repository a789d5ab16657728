"""Attention merged from a call a level of prefixes: the same numbers as by copies of keys, forward and backward.

There is no CUDA card here: the varlen pair of PyTorch is stood in for by dense maths, registered for the CPU under the
pair's own schema, so that every argument is checked by PyTorch's dispatcher.
"""

from functools import partial

import pytest
import torch

from tests import tiny
from tests.batches import Batch, alone, gradient, padded, ready_to_pack
from tests.light.packing.test_trie import tree_of_sequences
from trl_ext.packing import attention, kernels, merge
from trl_ext.packing.kernels import choose_kernel, merging_pays, sdpa_attention
from trl_ext.packing.merge import CpuKernel, VarlenKernel, merged_attention
from trl_ext.packing.plan import PlannedRow, plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable
from trl_ext.trainers.forward.completions import plan, score, unpad

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6  # relative, of whole models: that of the trainers' exactness tests


def dense_run(q, k, is_causal, scale, left, right):
    """Scores [H, Tq, Tk] of one run, with minus infinity where a query does not look."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    hidden = (ahead > 0) if is_causal or right == 0 else torch.zeros_like(ahead, dtype=torch.bool)
    assert left == -1 and right == (0 if is_causal else -1)
    return scores.masked_fill(hidden, float("-inf"))


def runs_of(cu_q, cu_k, max_q, max_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    for i in range(len(cu_q) - 1):
        yield slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))


def dense_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale=None, **options):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernel knows one head size"
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for here, keys in runs_of(cu_q, cu_k, max_q, max_k):
        scores = dense_run(
            q[here], k[keys], is_causal, scale, options["window_size_left"], options["window_size_right"]
        )
        lse[:, here] = scores.logsumexp(-1)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    nothing = q.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def dense_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, *, scale=None,
                   window_size_left=None, window_size_right=None):  # fmt: skip
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rep = q.shape[1] // k.shape[1]
    for here, keys in runs_of(cu_q, cu_k, max_q, max_k):
        scores = dense_run(q[here], k[keys], is_causal, scale, window_size_left, window_size_right)
        p = (scores - lse[:, here, None]).exp()
        k1, v1 = (x[keys].repeat_interleave(rep, dim=1) for x in (k, v))
        delta = (grad[here] * out[here]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", grad[here], v1) - delta) * scale
        dq[here] = torch.einsum("hqk,khd->qhd", ds, k1)
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[here]).unflatten(1, (-1, rep)).sum(2)
        dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[here]).unflatten(1, (-1, rep)).sum(2)
    return dq, dk, dv


@pytest.fixture
def varlen_pair_on_the_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", dense_forward, "CPU")
    library.impl("_flash_attention_backward", dense_backward, "CPU")
    yield
    library._destroy()


def row_of(seed: int) -> PlannedRow:
    items, beginnings, _ = tree_of_sequences(seed)
    (row,) = plan_rows(items, None, beginnings)
    return row


def results(attend, row, heads, seed):
    """Output and gradients of q, k and v."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads[0], row.num_tokens, 16, generator=draw)
    k, v = (torch.randn(1, heads[1], row.num_tokens, 16, generator=draw) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, SegmentTable(row.segments, CPU), scale=0.3, window=None)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=draw))]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("kernel", [CpuKernel(), VarlenKernel()], ids=["cpu", "varlen"])
def test_merged_attention_is_that_by_copies(kernel, heads, varlen_pair_on_the_cpu):
    depths = set()
    for seed in range(12):
        row = row_of(seed)
        table = SegmentTable(row.segments, CPU)
        depths.add(len(table.parts) - 1)
        ours = results(lambda *x, **how: merged_attention(*x, **how, kernel=kernel), row, heads, seed)
        expected = results(sdpa_attention, row, heads, seed)
        for one, other in zip(ours, expected, strict=True):
            assert (one - other).norm() <= TOLERANCE * other.norm()
    assert {1, 2} <= depths


def test_a_kernel_that_knows_no_fewer_key_heads_gets_a_copy_for_every_query_head(monkeypatch):
    row = row_of(1)
    expected = results(sdpa_attention, row, (6, 2), 0)
    monkeypatch.setattr(merge, "cpu_attention_shares_keys", lambda: False)
    ours = results(lambda *x, **how: merged_attention(*x, **how, kernel=CpuKernel()), row, (6, 2), 0)
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


def test_tries_of_the_tests_go_four_levels_deep_and_their_queries_are_no_slices():
    tables = [SegmentTable(row_of(seed).segments, CPU) for seed in range(60)]
    assert max(len(table.parts) for table in tables) > 4
    assert any(isinstance(part.queries, torch.Tensor) for table in tables for part in table.parts)


def test_a_level_of_groups_is_two_slices_and_no_copy():
    table = SegmentTable(plan_rows([RowSize(g, 30, own) for g in (0, 1) for own in (5, 4)])[0].segments, CPU)
    _, level = table.parts
    assert (level.keys, level.queries) == (slice(0, 60), slice(60, 78))
    assert (level.key_lengths, level.query_lengths) == ([30, 30], [9, 9])


# Which kernel serves ----------------------------------------------------------------------------------------------


def test_merging_pays_where_many_keys_would_be_copied_and_no_window_cuts():
    for *row, pays in (
        (6158, 22542, 1280, None, True),  # prompt 1,024, 16 completions of 256
        (5115, 7500, 2048, None, False),  # prompt 150, completions of 300: half a copy a token
        (100, 200, 60, None, True),
        (100, 199, 60, None, False),
        (100, 900, 60, 60, True),  # no token has more keys than the window
        (100, 900, 60, 59, False),
    ):
        assert merging_pays(*row) == pays, row


HALF, FULL = torch.bfloat16, torch.float32


def test_the_kernel_follows_device_precision_what_was_asked_for_and_whether_merging_pays(subtests, monkeypatch):
    monkeypatch.setattr(kernels, "has_varlen_attn", lambda device: True)
    monkeypatch.setattr(kernels, "is_exact", lambda *where: True)
    for base, device, dtype, head_size, dropout, pays, name in (
        ("sdpa", "cpu", HALF, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 64, 0.0, False, "varlen_attention"),
        ("sdpa", "cuda", torch.float16, 128, 0.0, False, "varlen_attention"),
        ("sdpa", "cuda", FULL, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 512, 0.0, False, "sdpa_attention"),
        ("flash_attention_2", "cuda", HALF, 64, 0.0, False, "flash_attention"),
        ("flash_attention_3", "cuda", HALF, 64, 0.0, False, "flash_attention"),
        ("flash_attention_2", "cpu", HALF, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cpu", FULL, 64, 0.0, True, "merged_attention"),
        ("sdpa", "cuda", HALF, 64, 0.0, True, "merged_attention"),
        ("sdpa", "cpu", FULL, 64, 0.1, True, "sdpa_attention"),
        ("sdpa", "cuda", FULL, 64, 0.0, True, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 64, 0.1, True, "sdpa_attention"),
        ("flash_attention_2", "cuda", HALF, 64, 0.0, True, "flash_attention"),
    ):
        with subtests.test((base, device, str(dtype), pays)):
            chosen = choose_kernel(base, torch.device(device), dtype, head_size, dropout, merging_pays=pays)
            assert getattr(chosen, "func", chosen).__name__ == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_here(dtype, varlen_pair_on_the_cpu):
    assert merge.is_exact(CpuKernel(), CPU, dtype, 64)
    assert merge._error(VarlenKernel(), CPU, torch.float32, 64) < 1e-5


class Faulty(CpuKernel):
    """A kernel with one of its results wrong.

    Args:
        fault: out, lse, q, k or v: which is off by a tenth; "prefixes": they weigh nothing.
    """

    # The answer of the check is kept for equal kernels.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, fault: str):
        object.__setattr__(self, "fault", fault)

    def forward(self, qkv, part, scale):
        out, lse = super().forward(qkv, part, scale)
        if self.fault == "prefixes" and not part.is_causal:
            return out, lse - 100
        return out * (1.1 if self.fault == "out" else 1.0), lse + (
            0.1 if self.fault == "lse" and part.is_causal else 0
        )

    def backward(self, *given):
        grads = super().backward(*given)
        return tuple(one * (1.1 if name == self.fault else 1.0) for name, one in zip("qkv", grads, strict=True))


FAULTS = ("out", "lse", "q", "k", "v", "prefixes")


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
@pytest.mark.parametrize("kernel", [*map(Faulty, FAULTS), VarlenKernel()], ids=[*FAULTS, "missing"])
def test_a_kernel_that_is_wrong_or_missing_is_not_used(kernel, dtype, monkeypatch):
    said = []
    monkeypatch.setattr(merge.logger, "warning", said.append)
    for head_size in (24, 64):
        assert not merge.is_exact(kernel, CPU, dtype, head_size)
    assert "Keys are copied instead" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
def test_a_level_that_is_missed_is_found(dtype, monkeypatch):
    whole = SegmentTable.parts.func
    for kept in (slice(0, -1), slice(0, 1)):
        monkeypatch.setattr(SegmentTable, "parts", property(lambda table, kept=kept: whole(table)[kept]))
        assert not merge.is_exact(Faulty("none"), CPU, dtype, 24)
        monkeypatch.undo()
        assert merge.is_exact(Faulty("none"), CPU, dtype, 24)


def test_a_compiled_layer_merges_as_an_eager_one():
    (row,) = plan_rows([RowSize(0, 30, own) for own in (5, 4, 3)])
    table = SegmentTable(row.segments, CPU)
    assert merging_pays(row.num_tokens, table.num_keys, table.longest, None)
    # A head size of its own: the check runs while PyTorch's compiler looks on.
    x = torch.randn(1, 2, row.num_tokens, 24, generator=torch.Generator().manual_seed(0))

    def layer(x):
        return attention.attend(torch.nn.Module(), x, x, x + 1, None, base="sdpa", segments=table)[0] * 2

    compiled = torch.compile(layer, backend="eager")(x)
    assert torch.equal(compiled, layer(x))


# Whole models -----------------------------------------------------------------------------------------------------


def forking_batch(seed: int) -> Batch:
    """Rows whose prompts fork, with completions that begin alike, too."""
    items, _, sequences = tree_of_sequences(seed)
    rows = []
    for item, tokens in zip(items, sequences, strict=True):
        ids = tuple(token + 3 for token in tokens)
        rows.append((ids[: item.shared + 1], ids[item.shared + 1 :] or (5,)))
    return padded(rows[:9])


@pytest.mark.parametrize("merges", ["wherever a window allows", "nowhere"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "gemma3"])
def test_log_probs_and_gradients_of_random_tries_are_those_of_each_row_alone(family, merges, monkeypatch):
    anywhere = merges != "nowhere"
    pays = lambda t, k, longest, window: anywhere and (window is None or longest <= window)  # noqa: E731
    monkeypatch.setattr(attention, "merging_pays", pays)
    model = ready_to_pack(tiny.model(family), outputs=("log_probs", "entropy"))
    for seed in (1, 6, 36):
        given = forking_batch(seed)
        flat = unpad(given.input_ids, given.attention_mask, given.width)
        reference = tiny.model(family)
        expected, _ = alone(reference, given)
        expected_gradient = gradient(reference, (expected * given.weights()).sum())
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.train()
            packed = score(model, flat, plan(flat, True), CPU)
            assert packed.num_forwarded < flat.num_raw
            assert (packed.logps - expected).abs().max() < 5 * TOLERANCE
            ours = gradient(model, (packed.logps * given.weights()).sum())
            assert (ours - expected_gradient).norm() <= GRADIENT_TOLERANCE * expected_gradient.norm()
        model.gradient_checkpointing_disable()


@pytest.mark.parametrize("way", ["merged", "copied"])
@pytest.mark.parametrize("family", tiny.LATENT)
def test_varlen_kernels_get_values_of_the_size_of_keys(family, way, monkeypatch, varlen_pair_on_the_cpu):
    """Multi-head latent attention, whose values are smaller."""

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_left):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernel knows one head size"
        runs = runs_of(cu_q, cu_k, max_q, max_k)
        parts = ((dense_run(q[here], k[keys], True, scale, -1, 0), v[keys]) for here, keys in runs)
        return torch.cat([torch.einsum("hqk,khd->qhd", scores.softmax(-1), values) for scores, values in parts])

    monkeypatch.setattr(kernels, "call_varlen_attn", varlen)
    kernel = kernels.varlen_attention if way == "copied" else partial(merged_attention, kernel=VarlenKernel())
    monkeypatch.setattr(attention, "choose_kernel", lambda *where, **how: kernel)
    model, reference = ready_to_pack(tiny.model(family), outputs=("log_probs", "entropy")), tiny.model(family)
    given = forking_batch(1)
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    expected, _ = alone(reference, given)
    packed = score(model, flat, plan(flat, True), CPU)
    assert (packed.logps - expected).abs().max() < 5 * TOLERANCE
    ours = gradient(model, (packed.logps * given.weights()).sum())
    theirs = gradient(reference, (expected * given.weights()).sum())
    assert (ours - theirs).norm() <= GRADIENT_TOLERANCE * theirs.norm()

"""Attention merged from a call a level of prefixes: the same numbers as by copies of keys, forward and backward.

There is no CUDA card here: the varlen pair of PyTorch is stood in for by dense maths, registered for the CPU under the
pair's own schema, so that every argument is checked by PyTorch's dispatcher.
"""

import sys
import types
from functools import partial, wraps
from inspect import unwrap

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from tests import tiny
from tests.batches import Batch, alone, gradient, padded, ready_to_pack
from tests.light.packing.test_trie import tree_of_sequences
from trl_ext.compat.transformers import flash_backward_function, flash_varlen_function
from trl_ext.errors import PackingError
from trl_ext.packing import attention, kernels, merge
from trl_ext.packing.kernels import choose_kernel, merging_pays, sdpa_attention
from trl_ext.packing.merge import CpuKernel, FlashKernel, VarlenKernel, merged_attention
from trl_ext.packing.plan import PlannedRow, plan_rows
from trl_ext.packing.recompute import checkpoint_contexts
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

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
    hidden |= (ahead < -left) & (left >= 0)
    assert right == (0 if is_causal else -1)
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


def flash_varlen(qkv, cu_q, cu_k, max_q, max_k, scale, causal, window):
    """Output and log-sum-exp, with the gradient of the output; `window` has (keys before a query, keys after it)."""
    lengths = cu_q, cu_k, max_q, max_k
    assert window in ((-1, -1), (None, None)) or (causal and window[0] >= 0 and window[1] == 0)
    seen = {**NO_WINDOW[causal], "window_size_left": -1 if window[0] is None else window[0]}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *qkv):
            out, lse, *_ = dense_forward(*qkv, *lengths, 0.0, causal, False, scale=scale, **seen)
            ctx.save_for_backward(*qkv, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, grad, _):
            given = grad, *ctx.saved_tensors, *lengths, 0.0, causal, None, None
            return dense_backward(*given, scale=scale, **seen)

    return Attention.apply(*qkv)


NO_WINDOW = {causal: dict(window_size_left=-1, window_size_right=0 if causal else -1) for causal in (True, False)}


def flash_2():
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = flash_varlen((q, k, v), *lengths, softmax_scale, causal, window_size)
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                                    max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left,
                                    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
                                    zero_tensors=False):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        given = dout, q, k, v, out, softmax_lse, *lengths, 0.0, causal, None, None
        for x, y in zip((dq, dk, dv), dense_backward(*given, scale=softmax_scale, **NO_WINDOW[causal]), strict=True):
            x.copy_(y)

    def _flash_attn_backward(*_):
        raise AssertionError("this one is for padded rows")

    return flash_attn_varlen_func, _flash_attn_varlen_backward, _flash_attn_backward


def flash_3():
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                               seqused_k=None, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1),
                               softcap=0.0, num_splits=1, deterministic=False, return_attn_probs=False):  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = flash_varlen((q, k, v), *lengths, softmax_scale, causal, window_size)
        return (out, lse) if return_attn_probs else out

    @torch.library.custom_op("trl_ext_tests::flash_3", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        softmax_lse: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: torch.Tensor | None = None,
        dk: torch.Tensor | None = None, dv: torch.Tensor | None = None, softmax_scale: float | None = None,
        is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        deterministic: bool = False, sm_margin: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        given = dout, q, k, v, out, softmax_lse, *lengths, 0.0, is_causal, None, None
        found = dense_backward(*given, scale=softmax_scale, **NO_WINDOW[is_causal])
        for x, y in zip((dq, dk, dv), found, strict=True):
            x.copy_(y)
        return torch.empty(0)

    return flash_attn_varlen_func, _flash_attn_backward


# The head sizes that version 4 takes by card, and the card that its stand-in runs on.
HOPPER, BLACKWELL = range(8, 257), (*range(8, 129), 256)
ON_CARD = HOPPER


def flash_4():
    """The names, orders and refusals of flash-attn-4 4.0.0b36, `flash_attn/cute/interface.py`."""

    def check(q, v):
        assert q.shape[-1] in ON_CARD, f"(head_dim, head_dim_v)=({q.shape[-1]}, {v.shape[-1]}) is not supported"

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
        gather_bwd_token_chunk=None,
    ):  # fmt: skip
        check(q, v)
        assert q.dtype == k.dtype == v.dtype and cu_seqlens_q.stride(0) == cu_seqlens_k.stride(0) == 1
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = flash_varlen((q, k, v), *lengths, softmax_scale, causal, window_size)
        needs_lse = return_lse or any(x.requires_grad for x in (q, k, v))
        return out, lse if needs_lse else None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
        learnable_sink=None,
    ):  # fmt: skip
        check(q, v)
        assert lse.dtype == torch.float32 and q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
        # Both below 0: no window.
        assert window_size_left == window_size_right == -1 and softcap == 0.0
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        found = dense_backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, None, None, scale=softmax_scale,
                               **NO_WINDOW[causal])  # fmt: skip
        return [x.copy_(y) for x, y in zip((dq, dk, dv), found, strict=True)]

    return flash_attn_varlen_func, _flash_attn_bwd


FLASH = {
    "flash_attention_2": ("flash_attn", flash_2),
    "flash_attention_3": ("flash_attn_interface", flash_3),
    "flash_attention_4": ("flash_attn.cute.interface", flash_4),
}


@pytest.fixture
def flash(request, monkeypatch):
    """A stand-in for one version, under the name of its module and with its arguments; yields transformers' name."""
    name, functions = FLASH[request.param]
    module = types.ModuleType(name)
    for function in functions():
        public = getattr(function, "_init_fn", function)
        public.__module__ = name
        setattr(module, public.__name__, function)
    module.flash_attn_func = module.flash_attn_with_kvcache = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, name, module)
    if request.param == "flash_attention_4":  # its public names are imported into the package
        package = types.ModuleType("flash_attn.cute")
        package.flash_attn_func, package.flash_attn_varlen_func = module.flash_attn_func, module.flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    if request.param == "flash_attention_2":
        monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding := types.ModuleType("padding"))
        padding.pad_input = padding.unpad_input = None
        monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    for one in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
        monkeypatch.setattr(flash_utils, one, None)
    caches = flash_varlen_function, flash_backward_function
    for cached in caches:
        cached.cache_clear()
    yield request.param
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("flash", FLASH, indirect=True)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_flash_attention_of_each_version_merges_and_copies_as_sdpa_does(flash, heads):
    merged = partial(merged_attention, kernel=FlashKernel(flash))
    copied = partial(kernels.flash_attention, base=flash)
    for seed in range(6):
        row = row_of(seed)
        for attend, window in (
            (merged, None),
            (partial(merged, copies=True), None),
            (copied, None),
            (copied, 2),
            (copied, 5),
        ):
            expected = results(sdpa_attention, row, heads, seed, window)
            ours = results(lambda *x, attend=attend, **how: attend(*x, **how), row, heads, seed, window)
            for one, other in zip(ours, expected, strict=True):
                assert (one - other).norm() <= TOLERANCE * other.norm()


def test_off_the_cpu_each_query_head_gets_keys_of_its_own(monkeypatch):
    """On cards only flash-attention reads shared key heads, and it takes no mask."""
    row, calls, plain = row_of(0), [], torch.nn.functional.scaled_dot_product_attention

    def seen(q, k, v, **how):
        calls.append((q.shape[1], k.shape[1], v.shape[1], how["enable_gqa"], how["attn_mask"] is None))
        return plain(q, k, v, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    query, key = (torch.zeros(1, heads, row.num_tokens, 8, device="meta") for heads in (4, 2))
    out = sdpa_attention(query, key, key, SegmentTable(row.segments, torch.device("meta")), scale=None, window=None)
    assert out.shape == (1, row.num_tokens, 4, 8)
    assert {call[:4] for call in calls} == {(4, 4, 4, False)} and {call[4] for call in calls} == {True, False}


@pytest.fixture
def on_card(monkeypatch):
    """Chooses kernels as on a card in half precision, and tries them here in float32; returns what is warned of."""
    said = []
    monkeypatch.setattr(kernels.logger, "warning", said.append)
    monkeypatch.setattr(merge.logger, "warning", said.append)
    monkeypatch.setattr(kernels, "has_varlen_attn", lambda device: True)
    takes_rows, is_exact = unwrap(kernels.takes_rows), unwrap(merge.is_exact)  # whose answers are not kept
    monkeypatch.setattr(kernels, "takes_rows", lambda base, _, dtype, *rest: takes_rows(base, CPU, FULL, *rest))
    monkeypatch.setattr(kernels, "is_exact", lambda kernel, _, dtype, size: is_exact(kernel, CPU, FULL, size))
    return said


def chosen_on_card(base, head_size, **how):
    chosen = choose_kernel(base, torch.device("cuda"), HALF, head_size, **how)
    return getattr(chosen, "func", chosen).__name__, getattr(chosen, "keywords", {})


@pytest.mark.parametrize("flash", FLASH, indirect=True)
def test_a_small_row_goes_through_a_flash_attention_before_it_is_chosen(flash, on_card, monkeypatch):
    for has_window in (False, True):
        assert chosen_on_card(flash, 64, has_window=has_window) == ("flash_attention", {"base": flash})
    assert not on_card
    attend = kernels.flash_attention
    for off, slope in ((1.1, 1.0), (1.0, 0.9)):  # of the output, and of its gradients

        def faulty(*given, off=off, slope=slope, **how):
            out = attend(*given, **how)
            return out.detach() * off + slope * (out - out.detach())

        monkeypatch.setattr(kernels, "flash_attention", faulty)
        assert chosen_on_card(flash, 64) == ("varlen_attention", {})
    assert len(on_card) == 2 and all("a relative error of 1.0e-01" in said for said in on_card)
    assert on_card[0].startswith(f"{flash} is not used for packed rows with heads of 64 on cpu in torch.float32")


@pytest.mark.parametrize("flash", ["flash_attention_4"], indirect=True)
def test_head_sizes_that_version_4_does_not_take_on_blackwell_are_computed_by_pytorchs_kernel(
    flash, on_card, monkeypatch, varlen_pair_on_the_cpu
):
    monkeypatch.setattr(sys.modules[__name__], "ON_CARD", BLACKWELL)
    for head_size, name in ((64, "flash_attention"), (128, "flash_attention"), (256, "flash_attention")):
        assert chosen_on_card(flash, head_size)[0] == name
    assert not on_card
    for head_size in (136, 192, 248):
        assert chosen_on_card(flash, head_size)[0] == "varlen_attention"
        assert chosen_on_card(flash, head_size, merging_pays=True)[1] == {"kernel": VarlenKernel(), "copies": False}
    assert "flash_attention_4 is not used for packed rows with heads of 136" in on_card[0]
    assert "(head_dim, head_dim_v)=(136, 136)" in on_card[0] and on_card[0].endswith("with the same results.")


@pytest.mark.parametrize("flash", FLASH, indirect=True)
def test_a_checkpointed_layer_stores_the_output_of_copied_keys_too(flash, on_card):
    """Version 4 is no operation of PyTorch's, which a dispatch mode would see."""
    row = row_of(1)
    first, again = checkpoint_contexts()
    calls = []

    def attend(*inputs, **how):
        name, given = chosen_on_card(flash, 16)
        assert (name, given["copies"]) == ("merged_attention", True)
        given = {**given, "kernel": Counting(flash, calls)}
        return merged_attention(*inputs, **given, **how)

    with first:
        stored = results(attend, row, (4, 2), 0)
        assert chosen_on_card(flash, 16, has_window=True)[0] == "flash_attention"
    with again:
        read = results(attend, row, (4, 2), 0)
    assert calls == ["forward"], "attention is computed again"
    expected = results(sdpa_attention, row, (4, 2), 0)
    for one, two, other in zip(stored, read, expected, strict=True):
        assert torch.equal(one, two)
        assert (one - other).norm() <= TOLERANCE * other.norm()


class Counting(FlashKernel):
    """Writes its forwards down."""

    def __init__(self, base, calls):
        super().__init__(base)
        object.__setattr__(self, "calls", calls)

    def forward(self, *given):
        self.calls.append("forward")
        return super().forward(*given)


class AskedAnew(FlashKernel):
    # The answer of the check is kept for equal kernels.
    __eq__, __hash__ = object.__eq__, object.__hash__


@pytest.mark.parametrize("flash", FLASH, indirect=True)
def test_flash_attention_merges_where_its_own_backward_agrees(flash, monkeypatch):
    assert merge._error(FlashKernel(flash), CPU, torch.float32, 64) < 1e-5
    assert merge.is_exact(AskedAnew(flash), CPU, torch.float32, 64)
    flash_backward_function.cache_clear()
    module = sys.modules[FLASH[flash][0]]
    for name in [name for name in vars(module) if name.startswith("_flash_attn")]:
        monkeypatch.delattr(module, name)
    assert not merge.is_exact(AskedAnew(flash), CPU, torch.float32, 64), "there is no backward to take"


@pytest.mark.parametrize("flash", ["flash_attention_3"], indirect=True)
def test_a_kernel_without_a_backward_is_no_silent_zero(flash):
    """vLLM's build, which transformers takes where the package is missing, is for inference."""
    module = sys.modules[FLASH[flash][0]]
    whole = module.flash_attn_varlen_func

    @wraps(whole)
    def forward_only(*qkv, **options):
        return whole(*(x.detach() for x in qkv), **options)

    module.flash_attn_varlen_func = forward_only
    with pytest.raises(PackingError, match="flash_attention_3 has no backward"):
        results(partial(kernels.flash_attention, base=flash), row_of(1), (4, 2), 0)


def row_of(seed: int) -> PlannedRow:
    items, shareable, _ = tree_of_sequences(seed)
    (row,) = plan_rows(items, None, shareable)
    return row


def results(attend, row, heads, seed, window=None):
    """Output and gradients of q, k and v."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads[0], row.num_tokens, 16, generator=draw)
    k, v = (torch.randn(1, heads[1], row.num_tokens, 16, generator=draw) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, SegmentTable(row.segments, CPU), scale=0.3, window=window)
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
    monkeypatch.setattr(kernels, "takes_rows", lambda *where: True)
    for base, device, dtype, head_size, dropout, pays, name in (
        ("sdpa", "cpu", HALF, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 64, 0.0, False, "varlen_attention"),
        ("sdpa", "cuda", torch.float16, 128, 0.0, False, "varlen_attention"),
        ("sdpa", "cuda", FULL, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 512, 0.0, False, "sdpa_attention"),
        ("flash_attention_2", "cuda", HALF, 64, 0.0, False, "flash_attention"),
        ("flash_attention_3", "cuda", HALF, 64, 0.0, False, "flash_attention"),
        ("flash_attention_4", "cuda", HALF, 64, 0.0, False, "flash_attention"),
        ("flash_attention_2", "cpu", HALF, 64, 0.0, False, "sdpa_attention"),
        ("sdpa", "cpu", FULL, 64, 0.0, True, "merged_attention"),
        ("sdpa", "cuda", HALF, 64, 0.0, True, "merged_attention"),
        ("sdpa", "cpu", FULL, 64, 0.1, True, "sdpa_attention"),
        ("sdpa", "cuda", FULL, 64, 0.0, True, "sdpa_attention"),
        ("sdpa", "cuda", HALF, 64, 0.1, True, "sdpa_attention"),
        ("flash_attention_2", "cuda", HALF, 64, 0.0, True, "merged_attention"),
        ("flash_attention_3", "cuda", HALF, 64, 0.1, True, "sdpa_attention"),
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
            assert packed.num_forwarded < len(flat.sequences.tokens)
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


def test_the_summary_names_the_kernels_of_attention(subtests, monkeypatch):
    monkeypatch.setattr(kernels, "has_varlen_attn", lambda device: True)
    monkeypatch.setattr(kernels, "is_exact", lambda *where: True)
    monkeypatch.setattr(kernels, "takes_rows", lambda *where: True)
    choose = kernels.choose_kernel
    for base, device, dtype, packs, words in (
        ("sdpa", "cpu", FULL, True, "sdpa by segments (flash), long shared prompts merged"),
        ("sdpa", "cpu", FULL, False, "sdpa (flash)"),
        ("sdpa", "cuda", HALF, True, "PyTorch's varlen kernel, long shared prompts merged"),
        ("flash_attention_3", "cuda", HALF, True, "flash_attention_3, long shared prompts merged"),
        ("flash_attention_3", "cuda", HALF, False, "flash_attention_3"),
        ("sdpa", "cuda", FULL, True, "sdpa by segments (flash)"),
    ):
        # Chosen as on that device, and asked of this one.
        on_device = partial(
            lambda where, base, _, *rest, **how: choose(base, where, *rest, **how), torch.device(device)
        )
        monkeypatch.setattr(kernels, "choose_kernel", on_device)
        with subtests.test((base, device, str(dtype), packs)):
            assert kernels.kernels_in_words(base, CPU, dtype, 64, packs=packs) == words

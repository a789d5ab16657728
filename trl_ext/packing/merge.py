"""Attention over a flat row without copies of keys: one call for the segments, and one for each level of prefixes.

Every query's softmax over all its keys is combined from the calls' softmaxes by their log-sum-exp. In the backward
each call gets the combined output and log-sum-exp, which is all that the gradient of a softmax needs (as in ring
attention, arXiv:2310.01889).

Legend: T tokens of the flat row, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers.utils import logging

from trl_ext.compat.torch import cpu_attention_shares_keys
from trl_ext.compat.transformers import call_flash, flash_backward_function, flash_varlen_function
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.recompute import merged_output
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import AttentionCall, SegmentTable

logger = logging.get_logger(__name__)

# Queries, keys and values: q [T, H, D], k and v [T, Hkv, D]; or their gradients.
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attended(NamedTuple):
    """The output of attention over some keys, and the log-sum-exp by which it joins the output of other keys."""

    out: torch.Tensor  # [T, H, D]
    lse: torch.Tensor  # [H, T] float32


class Kernel(Protocol):
    """A library's attention over runs of tokens."""

    def forward(self, qkv: Triple, part: AttentionCall, scale: float | None) -> Attended:
        """Return output and log-sum-exp."""

    def backward(
        self, grad: torch.Tensor, qkv: Triple, out: torch.Tensor, lse: torch.Tensor, part: AttentionCall, scale: Any
    ) -> Triple:
        """Return the gradients of q, k and v.

        Args:
            grad: [T, H, D] gradient of the output.
            qkv: Queries, keys and values of the call.
            out, lse: [T, H, D] and [H, T], over all keys that a query sees, not only this call's.
            part: Runs of queries and keys of the call.
            scale: Factor of the scores; None for 1 / sqrt(D).
        """


@dataclass(frozen=True)
class VarlenKernel(Kernel):
    """PyTorch's flash-attention on CUDA in half precision: all runs in one call.

    It calls the operations below `varlen_attn`, whose backward does not accept another log-sum-exp.
    """

    def forward(self, qkv: Triple, part: AttentionCall, scale: float | None) -> Attended:
        lengths, window = _lengths(part), _window(part)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, *lengths, 0.0, part.is_causal, False, scale=scale, **window
        )
        return Attended(out, lse)

    def backward(
        self, grad: torch.Tensor, qkv: Triple, out: torch.Tensor, lse: torch.Tensor, part: AttentionCall, scale: Any
    ) -> Triple:
        """Overrides Kernel.backward."""
        lengths, window = _lengths(part), _window(part)
        random_state = torch.zeros(2, dtype=torch.uint64, device=out.device)  # for dropout, which is 0
        unused = torch.empty(0, device=out.device)
        lse = lse.contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, *qkv, out, lse, *lengths, 0.0, part.is_causal, random_state, unused, scale=scale, **window
        )
        return dq, dk, dv


@dataclass(frozen=True)
class FlashKernel(Kernel):
    """flash-attention of the version that the implementation `base` names: all runs in one call."""

    base: str

    def forward(self, qkv: Triple, part: AttentionCall, scale: float | None) -> Attended:
        function = flash_varlen_function(self.base)
        assert function is not None, "Kernels without a varlen function are refused when packing starts."
        # The log-sum-exp is asked for by `return_attn_probs` in versions 2 and 3, by `return_lse` in version 4.
        out, lse, *_ = call_flash(function, *qkv, **_flash_call(part, scale), return_attn_probs=True, return_lse=True)
        return Attended(out, lse)

    def backward(
        self, grad: torch.Tensor, qkv: Triple, out: torch.Tensor, lse: torch.Tensor, part: AttentionCall, scale: Any
    ) -> Triple:
        """Overrides Kernel.backward."""
        q, k, v = qkv
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lse = lse.contiguous()
        # The arguments of versions 2, 3 and 4, some under two names: `call_flash` leaves out what a version lacks.
        call_flash(
            flash_backward_function(self.base),
            dout=grad,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **_flash_call(part, scale),
            is_causal=part.is_causal,
            dropout_p=0.0,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv


# Below this number of queries the CPU kernel uses blocks of 32, above it larger blocks. With small blocks its backward
# takes 2.7 times as long in half precision as in float32, where it also does not round the gradients of keys once per
# block (measured with bfloat16 of AMX, 137 queries, 200 keys; from 192 queries on both take equally long).
SHORT = 192


def backward_type(num_queries: int, dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which the CPU kernel's backward is fastest."""
    return torch.promote_types(dtype, torch.float32) if num_queries < SHORT else dtype


@dataclass(frozen=True)
class CpuKernel(Kernel):
    """PyTorch's flash-attention on the CPU: one call per run."""

    def forward(self, qkv: Triple, part: AttentionCall, scale: float | None) -> Attended:
        q, k, v = qkv
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for queries, keys in _runs(part):
            run_out, run_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batch(q[queries]), _keys(k[keys], q), _keys(v[keys], q), 0.0, part.is_causal, scale=scale
            )
            out[queries], lse[:, queries] = run_out[0].transpose(0, 1), run_lse[0]
        return Attended(out, lse)

    def backward(
        self, grad: torch.Tensor, qkv: Triple, out: torch.Tensor, lse: torch.Tensor, part: AttentionCall, scale: Any
    ) -> Triple:
        """Overrides Kernel.backward."""
        q, k, v = qkv
        grads = dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for queries, keys in _runs(part):
            dtype = backward_type(queries.stop - queries.start, q.dtype)
            grad1, q1, out1 = (_batch(x[queries].to(dtype)) for x in (grad, q, out))
            k1, v1, lse1 = _keys(k[keys].to(dtype), q), _keys(v[keys].to(dtype), q), lse[None, :, queries]
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad1, q1, k1, v1, out1, lse1, 0.0, part.is_causal, scale=scale
            )
            for whole, here, (more,) in zip(grads, (queries, keys, keys), found, strict=True):
                if len(more) != whole.shape[1]:  # one gradient per query head, where several share a key head
                    more = more.unflatten(0, (whole.shape[1], -1)).sum(1)
                whole[here] = more.transpose(0, 1)
        return dq, dk, dv


def by_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Triple:
    """Return [1, heads, T, D] of a row as [T, heads, D], in the precision of the value."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # Under autocast a normalized query (Qwen3) is float32 while the value is bfloat16.
    return q.to(v.dtype), k.to(v.dtype), v


# torch.compile skips it: it would compile it again for every table.
@torch.compiler.disable
def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    kernel: Kernel,
    copies: bool = False,
    **how: Any,
) -> torch.Tensor:
    """Attend with each prefix's keys in memory once; `kernels.choose_kernel` decides when.

    Args:
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        segments: The segment table of the row.
        kernel: Library that computes a call.
        copies: Whether to make one call on copied keys, whose output a checkpointed layer can store.
        how: Options of `kernels.choose_kernel`; `scale` is read.
    """
    parts = (segments.copied,) if copies else segments.parts
    return _Merged.apply(*by_token(query, key, value), parts, kernel, how["scale"])[None]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> torch.Tensor:
        """Overrides torch.autograd.Function.forward; `call` has the parts, the kernel and the scale of `forward`."""
        out, lse = merged_output(lambda: forward((q, k, v), *call))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *qkv, out, lse = ctx.saved_tensors
        return (*backward(grads[0].contiguous(), tuple(qkv), out, lse, *ctx.call), None, None, None)


def forward(qkv: Triple, parts: tuple[AttentionCall, ...], kernel: Kernel, scale: float | None) -> Attended:
    """Return the output and the log-sum-exp of attention over the keys of all parts.

    Args:
        qkv: Queries, keys and values of the whole row.
        parts: The calls, segments first and then each level of prefixes.
        kernel: Library that computes a call.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    own, *levels = parts
    out, lse = kernel.forward(_of(own, qkv), own, scale)
    for part in levels:
        more, more_lse = kernel.forward(_of(part, qkv), part, scale)
        joint = torch.logaddexp(lse[:, part.queries], more_lse)
        weight = (more_lse - joint).exp().T[..., None]
        out[part.queries] = out[part.queries].float().lerp_(more.float(), weight).to(out.dtype)
        lse[:, part.queries] = joint
    return Attended(out, lse)


def backward(
    grad: torch.Tensor,
    qkv: Triple,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: tuple[AttentionCall, ...],
    kernel: Kernel,
    scale: float | None,
) -> Triple:
    """Return the gradients of q, k and v, summed over the keys of all parts.

    Args:
        grad: [T, H, D] gradient of the output.
        qkv: Queries, keys and values of the whole row.
        out, lse: [T, H, D] and [H, T], as `forward` has returned them.
        parts: The calls, segments first and then each level of prefixes.
        kernel: Library that computes a call.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    own, *levels = parts
    dq, dk, dv = kernel.backward(grad, _of(own, qkv), out, lse, own, scale)
    if isinstance(own.keys, torch.Tensor) or len(dk) < len(qkv[1]):  # copies, or the queries are a part of the row
        of_own, (dk, dv) = (dk, dv), map(torch.zeros_like, qkv[1:])
        for total, more in zip((dk, dv), of_own, strict=True):
            _add(total, own.keys, more)
    for part in levels:
        here = part.queries
        more_q, more_k, more_v = kernel.backward(grad[here], _of(part, qkv), out[here], lse[:, here], part, scale)
        _add(dq, here, more_q)
        _add(dk, part.keys, more_k)
        _add(dv, part.keys, more_v)
    return dq, dk, dv


def _of(part: AttentionCall, qkv: Triple) -> Triple:
    q, k, v = qkv
    return q[part.queries], k[part.keys], v[part.keys]


def _add(total: torch.Tensor, where: slice | torch.Tensor, more: torch.Tensor) -> None:
    if isinstance(where, slice):
        total[where] += more
    else:
        total.index_add_(0, where, more)


class CallLengths(NamedTuple):
    """The runs of a varlen call, in the order of PyTorch's arguments, under the names of flash-attention's."""

    cu_seqlens_q: torch.Tensor  # boundaries of the runs of queries, int32
    cu_seqlens_k: torch.Tensor  # of keys
    max_seqlen_q: int  # tokens of the longest run of queries
    max_seqlen_k: int  # of keys


def _lengths(part: AttentionCall) -> CallLengths:
    return CallLengths(part.cu_queries, part.cu_keys, max(part.query_lengths), max(part.key_lengths))


def _window(part: AttentionCall) -> dict[str, int]:
    """Return PyTorch's keywords for the keys that a query sees before and after itself: -1 is all of its run."""
    return {"window_size_left": -1, "window_size_right": 0 if part.is_causal else -1}


def _flash_call(part: AttentionCall, scale: float | None) -> dict[str, Any]:
    return {**_lengths(part)._asdict(), "softmax_scale": scale, "causal": part.is_causal}


def _runs(part: AttentionCall) -> list[tuple[slice, slice]]:
    runs, q, k = [], 0, 0
    for num_queries, num_keys in zip(part.query_lengths, part.key_lengths, strict=True):
        runs.append((slice(q, q + num_queries), slice(k, k + num_keys)))
        q, k = q + num_queries, k + num_keys
    return runs


def _batch(x: torch.Tensor) -> torch.Tensor:
    """Return [T, H, D] as [1, H, T, D], without a copy."""
    return x.transpose(0, 1)[None]


def _keys(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return [T, Hkv, D] as [1, Hkv, T, D], or as [1, H, T, D] if the kernel needs a key head for every query head."""
    return _batch(x if cpu_attention_shares_keys() else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1))


# Merged attention uses undocumented functions of PyTorch, and a backward with another call's output. So before its
# first use on a machine a small row goes through it, forward and backward, and through attention written out. Rounding
# explains relative errors up to these; a missing prefix gives more than half.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 3e-2


@torch.compiler.disable
@cache
def is_exact(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if merged attention agrees with attention written out; warn if it does not.

    Args:
        kernel: Library that computes a call.
        device, dtype: Device and type of queries, keys and values.
        head_size: D.
    """
    with torch.no_grad():
        reason = why_not(lambda: _error(kernel, device, dtype, head_size), device, dtype)
    if reason:
        logger.warning(
            f"Attention that keeps the keys of a shared prompt once is not used on {device} in {dtype}: {reason}. "
            "Keys are copied instead, which takes more memory and gives the same numbers."
        )
    return not reason


def why_not(error: Callable[[], float], device: torch.device, dtype: torch.dtype) -> str:
    """Return why a kernel cannot be used; "" if the relative error that `error` computes is one of rounding."""
    try:
        with torch.autocast(device.type, enabled=False):
            found = error()
    except (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError) as failure:
        # Any failure in another version of PyTorch or flash-attention means that it cannot be used.
        return f"{type(failure).__name__}: {failure}".partition("\n")[0].removesuffix(".")
    most = _HALF_TOLERANCE if dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    return "" if found <= most else f"a relative error of {found:.1e}"


class SmallRow(NamedTuple):
    """A row with nested prefixes, and random tensors for it, [T, heads, D]: with 4 heads, and k and v with 2."""

    table: SegmentTable
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor  # of the output


def small_row(device: torch.device, dtype: torch.dtype, head_size: int) -> SmallRow:
    """Return a row with nested prefixes, and random q, k, v and gradient of the output, [T, heads, D]."""
    beginnings = {0: [*range(40)], 1: [*range(21), 3, 4], 2: [*range(21), *range(9)]}
    # One completion is long enough for larger blocks and the other precision in the backward.
    owns = {0: (3, 9, 1), 1: (3, 9, 1), 2: (3, SHORT, 1)}
    items = [RowSize(group, len(tokens), own) for group, tokens in beginnings.items() for own in owns[group]]
    (row,) = plan_rows(items, None, [np.array(beginnings[item.group]) for item in items])
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(row.num_tokens, heads, head_size, generator=draw) for heads in (4, 2, 2, 4))
    return SmallRow(SegmentTable(row.segments, device), *(x.to(device, dtype) for x in drawn))


def largest_error(ours: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Return the largest relative error of some tensors, not a number if any of them has none."""
    errors = [(one.float() - other).norm() / other.norm() for one, other in zip(ours, exact, strict=True)]
    return torch.stack(errors).max().item()


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> float:
    """Return the largest relative error of output and gradients, on a row with nested prefixes.

    Args:
        kernel: Library that computes a call.
        device, dtype: Device and type of queries, keys and values.
        head_size: D.
    """
    table, q, k, v, grad = small_row(device, dtype, head_size)
    scale = head_size**-0.5
    exact = _write_out(q.float(), k.float(), v.float(), grad.float(), table, scale)
    calls = [table.parts, (table.copied,)] if isinstance(kernel, FlashKernel) else [table.parts]
    found: list[torch.Tensor] = []
    for parts in calls:
        out, lse = forward((q, k, v), parts, kernel, scale)
        found += out, *backward(grad, (q, k, v), out, lse, parts, kernel, scale)
    return largest_error(found, exact * len(calls))


class Written(NamedTuple):
    """The output of attention and the gradients of q, k and v, in the shapes of output, q, k and v."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _write_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, table: SegmentTable, scale: float
) -> Written:
    """Compute attention and its gradients with a mask over all pairs of tokens.

    Args:
        q: [T, H, D] in float32.
        k, v: [T, Hkv, D] in float32.
        grad: [T, H, D] gradient of the output.
        table: The segment table of the row.
        scale: Factor of the scores.
    """
    sees = torch.zeros(len(q), len(q), dtype=torch.bool, device=q.device)
    for segment, chain in zip(table.segments, table.chains, strict=True):
        for prefix in (table.segments[number] for number in chain[:-1]):
            sees[segment.start : segment.end, prefix.start : prefix.end] = True
        own = slice(segment.start, segment.end)
        sees[own, own] = torch.ones_like(sees[own, own]).tril()
    rep = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(rep, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", p, v)
    dp = torch.einsum("qhd,khd->hqk", grad, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    dk, dv = (x.unflatten(1, (-1, rep)).sum(2) for x in (dk, dv))
    return Written(out, torch.einsum("hqk,khd->qhd", ds, k), dk, dv)

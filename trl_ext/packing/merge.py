"""Attention over a flat row without a copy of keys: a call for the segments themselves, one a level of prefixes.

Every query's softmax over all its keys is put together from those over the keys of each call, by their log-sum-exp. In
the backward each call gets the whole output and log-sum-exp: the gradient of a softmax needs no more (ring attention
does the same, arXiv:2310.01889).

Legend: T tokens of the flat row, H query heads, Hkv key heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trl_ext.compat.torch import cpu_flash_backward, cpu_flash_forward, flash_backward, flash_forward
from trl_ext.packing.table import AttentionCall, SegmentTable


class Kernel(Protocol):
    """A library's attention over runs of tokens; q, out [T, H, D], k, v [T, Hkv, D], lse [H, T]."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: AttentionCall, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: AttentionCall,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v, given the output and log-sum-exp over all keys, not these alone."""


@dataclass(frozen=True)
class VarlenKernel:
    """PyTorch's flash-attention on CUDA, in half precision: all runs in one call."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: AttentionCall, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_forward(q, k, v, *_lengths(part), part.is_causal, scale)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: AttentionCall,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return flash_backward(grad, q, k, v, out, lse.contiguous(), *_lengths(part), part.is_causal, scale)


@dataclass(frozen=True)
class CpuKernel:
    """PyTorch's flash-attention on the CPU: a call a run. It knows no fewer key heads than query heads.

    Query heads of one key head are dealt to the batch, so that all of these see the same keys without a copy.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: AttentionCall, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for queries, keys in _runs(part):
            q1, k1, v1 = _batch(q[queries], k), _shared(k[keys], q), _shared(v[keys], q)
            run_out, run_lse = cpu_flash_forward(q1, k1, v1, part.is_causal, scale)
            _batch(out[queries], k).copy_(run_out)
            _batch_of_lse(lse[:, queries], k).copy_(run_lse)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: AttentionCall,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for queries, keys in _runs(part):
            grad1, q1, out1 = (_batch(x[queries], k) for x in (grad, q, out))
            k1, v1, lse1 = _shared(k[keys], q), _shared(v[keys], q), _batch_of_lse(lse[:, queries], k)
            dq1, dk1, dv1 = cpu_flash_backward(grad1, q1, k1, v1, out1, lse1, part.is_causal, scale)
            _batch(dq[queries], k).copy_(dq1)
            dk[keys], dv[keys] = dk1.sum(0).transpose(0, 1), dv1.sum(0).transpose(0, 1)
        return dq, dk, dv


# torch.compile leaves it out: it would compile it again for every table.
@torch.compiler.disable
def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
    kernel: Kernel,
) -> torch.Tensor:
    """Attention where every prefix's keys stand once; see `kernels.choose_kernel` for when."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # Under autocast a normalised query (Qwen3) arrives in float32 beside a bfloat16 value.
    return _Merged.apply(q.to(v.dtype), k.to(v.dtype), v, segments.parts, kernel, scale)[None]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        parts: tuple[AttentionCall, ...],
        kernel: Kernel,
        scale: float | None,
    ) -> torch.Tensor:
        out, lse = forward(q, k, v, parts, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = parts, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*backward(grads[0].contiguous(), *ctx.saved_tensors, *ctx.call), None, None, None)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: tuple[AttentionCall, ...],
    kernel: Kernel,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of attention over the keys of all parts."""
    own, *levels = parts
    out, lse = kernel.forward(q, k, v, own, scale)
    for part in levels:
        more, more_lse = kernel.forward(q[part.queries], k[part.keys], v[part.keys], part, scale)
        joint = torch.logaddexp(lse[:, part.queries], more_lse)
        weight = (more_lse - joint).exp().T[..., None]
        out[part.queries] = out[part.queries].float().lerp_(more.float(), weight).to(out.dtype)
        lse[:, part.queries] = joint
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts: tuple[AttentionCall, ...],
    kernel: Kernel,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v: the sums of those over the keys of each part."""
    own, *levels = parts
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, own, scale)
    for part in levels:
        here, keys = part.queries, part.keys
        given = grad[here], q[here], k[keys], v[keys], out[here], lse[:, here]
        more_q, more_k, more_v = kernel.backward(*given, part, scale)
        _add(dq, here, more_q)
        _add(dk, keys, more_k)
        _add(dv, keys, more_v)
    return dq, dk, dv


def _add(total: torch.Tensor, where: slice | torch.Tensor, more: torch.Tensor) -> None:
    if isinstance(where, slice):
        total[where] += more
    else:
        total.index_add_(0, where, more)


def _lengths(part: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return part.cu_queries, part.cu_keys, max(part.query_lengths), max(part.key_lengths)


def _runs(part: AttentionCall) -> list[tuple[slice, slice]]:
    runs, q, k = [], 0, 0
    for num_queries, num_keys in zip(part.query_lengths, part.key_lengths, strict=True):
        runs.append((slice(q, q + num_queries), slice(k, k + num_keys)))
        q, k = q + num_queries, k + num_keys
    return runs


def _batch(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as [H / Hkv, Hkv, T, D], without a copy."""
    return x.unflatten(1, (k.shape[1], -1)).permute(2, 1, 0, 3)


def _batch_of_lse(lse: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[H, T] as [H / Hkv, Hkv, T], without a copy."""
    return lse.unflatten(0, (k.shape[1], -1)).transpose(0, 1)


def _shared(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, D] as [H / Hkv, Hkv, T, D], every element of the batch the same memory."""
    return x.transpose(0, 1).expand(q.shape[1] // x.shape[1], -1, -1, -1)

"""Attention kernels for the segments of a flat row, and the choice between them.

Legend: T tokens of the flat row, all of them queries unless processes share the row, K keys after the prefixes are
repeated, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from transformers.utils import logging

from trl_ext.compat.torch import call_varlen_attn, cpu_attention_shares_keys, has_varlen_attn
from trl_ext.compat.transformers import call_flash, flash_varlen_function, is_flash
from trl_ext.errors import PackingError
from trl_ext.packing.merge import (
    CpuKernel,
    FlashKernel,
    Kernel,
    VarlenKernel,
    backward_type,
    by_token,
    is_exact,
    largest_error,
    merged_attention,
    small_row,
    why_not,
)
from trl_ext.packing.recompute import keeps_attention
from trl_ext.packing.table import SegmentTable

logger = logging.get_logger(__name__)


def choose_kernel(
    base: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    dropout: float = 0.0,
    merging_pays: bool = False,
    has_window: bool = False,
) -> Callable[..., torch.Tensor]:
    """Return the function that computes packed attention for these inputs.

    On CUDA in half precision it is the model's flash-attention if it has any that takes the rows, else PyTorch's
    varlen kernel; everywhere else it is `scaled_dot_product_attention` segment by segment. These copy the keys of
    prefixes. If merging pays, attention is merged instead, by the same kernel. Float32 on CUDA keeps the copies: its
    backward cannot be called separately.

    Args:
        base: The model's attention implementation.
        device, dtype: Of keys and values.
        head_size: Of queries, keys and values, after padding to one size.
        dropout: Of attention's weights.
        merging_pays: Whether merged attention takes less time than copied keys.
        has_window: Whether the layer has a sliding window.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    kernel: Kernel
    choice: Callable[..., torch.Tensor]
    if device.type == "cpu":
        choice, kernel = sdpa_attention, CpuKernel()
    elif device.type != "cuda" or not half or head_size > 256 or head_size % 8 or dropout:
        return sdpa_attention
    elif is_flash(base) and takes_rows(base, device, dtype, head_size, has_window):
        choice, kernel = partial(flash_attention, base=base), FlashKernel(base)
    elif not has_varlen_attn(device):
        return sdpa_attention
    else:
        choice, kernel = varlen_attention, VarlenKernel()
    # FlashAttention 4 is no operation of PyTorch's, of which a checkpointed layer could store the output.
    stores_copies = isinstance(kernel, FlashKernel) and keeps_attention() and not has_window
    if (merging_pays or stores_copies) and not dropout and is_exact(kernel, device, dtype, head_size):
        return partial(merged_attention, kernel=kernel, copies=not merging_pays)
    return choice


def kernels_in_words(base: str, device: torch.device, dtype: torch.dtype, head_size: int, *, packs: bool) -> str:
    """Return the names of the kernels for packed rows, or for padded rows, where a mask hides the padding.

    Args:
        base: The model's attention implementation.
        device, dtype: Of the model.
        head_size: Of its layers.
        packs: Whether rows are packed.
    """
    choice, other = (choose_kernel(base, device, dtype, head_size, merging_pays=pays) for pays in (False, True))
    known = {sdpa_attention: "sdpa by segments", varlen_attention: "PyTorch's varlen kernel"} if packs else {}
    words = known.get(choice, base)
    if words.startswith("sdpa"):
        q = torch.zeros(1, 1, 8, head_size, dtype=dtype, device=device)
        mask = None if packs else torch.ones(8, 8, dtype=torch.bool, device=device).tril()
        chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, attn_mask=mask, is_causal=packs))
        words += f" ({chosen.name.lower().removesuffix('_attention')})"
    is_merged = packs and getattr(other, "func", None) is merged_attention
    return f"{words}, long shared prompts merged" if is_merged else words


def merging_pays(num_tokens: int, num_keys: int, longest: int, window: int | None) -> bool:
    """Return True if attention without copies of keys is exact and worth its calls.

    Each level costs a call, and combining the outputs takes time: measured on one CPU core, merging is slower than
    copying 0.5 keys per token and faster than copying 2.7 (0.7 and 1.25 times as fast, bfloat16). Copies of at least
    as many keys as tokens also matter for memory.

    Args:
        num_tokens: T.
        num_keys: K, with the copies.
        longest: Most keys of a segment.
        window: Keys that a query sees, or None. A window that cuts into a prefix needs the copy.
    """
    return num_keys >= 2 * num_tokens and (window is None or longest <= window)


def sdpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute the reference: one `scaled_dot_product_attention` per segment, on any device, in any precision.

    Args:
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        segments: The segment table of the row.
        scale: Of the scores; None for 1 / sqrt(D).
        window: Keys that a query sees, itself the last; None for all.
        dropout: Of attention's weights.
    """
    shares_keys = query.shape[1] != key.shape[1]
    if shares_keys and query.device.type != "cpu":
        # On cards only flash-attention reads shared key heads, which takes no mask; else scores of [T, K] are stored.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        shares_keys = False
    # Split, not sliced: the backward of a slice fills a whole row with zeros, once per segment.
    queries = query.split(segments.query_lengths, dim=2)
    keys, values = (x.split(segments.lengths, dim=2) for x in (key, value))
    outputs = []
    for (number, segment), q in zip(segments.queries.items(), queries, strict=True):
        chain = segments.chains[number]
        k, v = _chain(keys, chain), _chain(values, chain)
        # A root within its window is simply causal: it needs no mask, and gets the faster kernel.
        plain = segment.num_keys == segment.length and (window is None or segment.length <= window)
        mask = None if plain else segments.mask(segment, window)
        is_half = q.device.type == "cpu" and backward_type(segment.length, v.dtype) != v.dtype
        if is_half and not dropout and (cpu_attention_shares_keys() or not shares_keys):
            outputs.append(_ShortRun.apply(q.to(v.dtype), k.to(v.dtype), v, mask, scale))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=plain, dropout_p=dropout, scale=scale, enable_gqa=shares_keys
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _chain(parts: Sequence[torch.Tensor], chain: Sequence[int]) -> torch.Tensor:
    """Return the keys or values that a segment sees, of all segments' `parts`."""
    return parts[chain[0]] if len(chain) == 1 else torch.cat([parts[i] for i in chain], dim=2)


class _ShortRun(torch.autograd.Function):
    """`scaled_dot_product_attention` of few queries in half precision on the CPU, its backward in float32."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        """Overrides torch.autograd.Function.forward: return the output, and keep it and the log-sum-exp.

        Args:
            q: [B, H, T, D].
            k, v: [B, Hkv, S, D].
            mask: [T, S], True where a query sees a key; None for a causal mask.
            scale: Factor of the scores; None for 1 / sqrt(D).
        """
        ctx.how = {"is_causal": mask is None, "scale": scale}
        if mask is not None:
            ctx.how["attn_mask"] = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **ctx.how)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        given = (*(x.float() for x in (grads[0], *saved)), lse)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, dropout_p=0.0, **ctx.how)
        return (*(x.to(grads[0].dtype) for x in found), None, None)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn`: one CUDA call, half precision, no flash-attn wheel.

    Args:
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        segments: The segment table of the row.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Keys that a query sees, itself the last; None for all.
        dropout: Always 0: rows with dropout go to `sdpa_attention`.
    """
    inputs = _varlen_inputs(query, key, value, segments)
    before = -1 if window is None else window - 1  # keys before itself that a query sees; -1 for all
    return call_varlen_attn(*inputs, scale=scale, window_left=before)[None]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
    base: str,
) -> torch.Tensor:
    """Call flash-attention of the version that `base` names.

    Args:
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        segments: The segment table of the row.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Keys that a query sees, itself the last; None for all.
        dropout: Always 0: rows with dropout go to `sdpa_attention`.
        base: The model's attention implementation, which names the version.
    """
    inputs = _varlen_inputs(query, key, value, segments)
    kernel = flash_varlen_function(base)
    assert kernel is not None, "Kernels without a varlen function are refused when packing starts."
    window_size = {} if window is None else {"window_size": (window - 1, 0)}
    out = call_flash(  # By name, since some versions have another order.
        kernel,
        inputs.q,
        inputs.k,
        inputs.v,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=inputs.cu_queries,
        cu_seqlens_k=inputs.cu_keys,
        max_seqlen_q=inputs.most_queries,
        max_seqlen_k=inputs.most_keys,
        **window_size,
    )
    out = out[0] if isinstance(out, tuple) else out  # version 4, and the first ones of 3, return the log-sum-exp too
    if torch.is_grad_enabled() and inputs.v.requires_grad and not out.requires_grad:
        raise PackingError(f"The kernel {base} has no backward. Train with another attn_implementation.")
    return out[None]


@torch.compiler.disable
@cache
def takes_rows(base: str, device: torch.device, dtype: torch.dtype, head_size: int, has_window: bool) -> bool:
    """Return True if a flash-attention computes a small packed row, forward and backward; warn if it does not.

    A kernel for inference has no backward, and version 4 takes fewer head sizes on Blackwell than on Hopper.

    Args:
        base: The model's attention implementation.
        device, dtype: Device and type of queries, keys and values.
        head_size: D.
        has_window: Whether a layer of the model has a sliding window.
    """
    reason = why_not(
        lambda: _error_of_copies(base, device, dtype, head_size, 9 if has_window else None), device, dtype
    )
    if reason:
        logger.warning(
            f"{base} is not used for packed rows with heads of {head_size} on {device} in {dtype}: {reason}. "
            "PyTorch's own kernel computes them, with the same results."
        )
    return not reason


def _error_of_copies(base: str, device: torch.device, dtype: torch.dtype, head_size: int, window: int | None) -> float:
    """Return the largest relative error of output and gradients against the reference in float32.

    Args:
        base: The model's attention implementation.
        device, dtype: Device and type of queries, keys and values.
        head_size: D.
        window: Keys that a query sees, itself the last; None for all.
    """

    def results(attend: Callable[..., torch.Tensor], to: torch.dtype) -> list[torch.Tensor]:
        *inputs, grad = (x.to(to, copy=True).requires_grad_() for x in drawn)
        out = attend(*(x.transpose(0, 1)[None] for x in inputs), table, scale=head_size**-0.5, window=window)
        return [out, *torch.autograd.grad(out, inputs, grad[None])]

    # A checkpointed layer counts the tensors that are saved in it, by a hook that these replace.
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), unhooked:
        table, *drawn = small_row(device, dtype, head_size)
        return largest_error(
            results(partial(flash_attention, base=base), dtype), results(sdpa_attention, torch.float32)
        )


class VarlenInputs(NamedTuple):
    """The arguments of varlen kernels, in PyTorch's order; K is T, or more where keys are copied."""

    q: torch.Tensor  # [T, H, D]
    k: torch.Tensor  # [K, Hkv, D]
    v: torch.Tensor  # [K, Hkv, D]
    cu_queries: torch.Tensor  # [M + 1] int32 boundaries of the segments' queries
    cu_keys: torch.Tensor  # [M + 1] int32 boundaries of their keys
    most_queries: int  # of a segment
    most_keys: int  # of a segment


def _varlen_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentTable
) -> VarlenInputs:
    """Return the arguments of varlen kernels, in one half precision, with keys gathered by segment.

    Args:
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        segments: The segment table of the row.
    """
    q, k, v = by_token(query, key, value)
    copies = segments.copies
    if copies.index is not None:
        k, v = k.index_select(0, copies.index), v.index_select(0, copies.index)
    return VarlenInputs(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        segments.cu_seqlens,
        copies.cu_seqlens,
        max(segments.query_lengths),
        copies.longest,
    )

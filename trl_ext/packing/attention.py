"""Attention over the segments of a flat row, registered with transformers as one more attention implementation.

A model whose `config._attn_implementation` is `packed_name("sdpa")` behaves as under "sdpa" until a forward carries
the keyword `segments`; then every layer attends within the segment table. The table travels as an argument, never as
global state, so a recompute under gradient checkpointing sees the segments of its own batch.

Legend: T queries of the flat row, K keys after the prefixes are repeated, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from trl_ext.compat.torch import call_varlen_attn, flash_attn_function, has_varlen_attn
from trl_ext.compat.transformers import attention_function, mask_function, register_attention
from trl_ext.errors import PackingError
from trl_ext.packing.layout import SegmentTable

SUFFIX = "+packed"
_FLASH_VERSIONS = {"flash_attention_2": 2, "flash_attention_3": 3}

# Set during a packed forward only, and read only where transformers builds masks: it saves [T, T] booleans, of which
# the segments and the window say everything.
_packed: ContextVar[bool] = ContextVar("packed", default=False)


@dataclass(frozen=True)
class WindowMask:
    """Stands for the [T, T] mask of a sliding window in a packed forward.

    Args:
        size: Keys that a query sees, itself the last.
    """

    size: int


def packed_name(base: str) -> str:
    """Name of the attention implementation that packs on top of `base` ("sdpa", "flash_attention_2", ...)."""
    return base if base.endswith(SUFFIX) else base + SUFFIX


def install(config: Any) -> None:
    """Let a model attend within segments whenever a forward brings some; idempotent.

    Args:
        config: The model's config, changed in place. transformers does not save this field with the model.
    """
    base = (config._attn_implementation or "sdpa").removesuffix(SUFFIX)
    # Eager attention lives in each model's own file, out of our reach; sdpa computes the same, or refuses.
    served_by = "sdpa" if base == "eager" else base
    register_attention(packed_name(base), partial(attend, base=served_by), partial(_mask, base=served_by))
    config._attn_implementation = packed_name(base)


def uninstall(config: Any) -> None:
    """Give the model its own attention implementation back."""
    config._attn_implementation = config._attn_implementation.removesuffix(SUFFIX)


def is_installed(config: Any) -> bool:
    return str(config._attn_implementation).endswith(SUFFIX)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Around a model call with `segments`: transformers need not build an attention mask."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | WindowMask | None,
    *,
    base: str,
    segments: SegmentTable | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer, in the shape that transformers' `AttentionInterface` wants.

    Args:
        query: [B, H, T, D]; B = 1 when `segments` is given.
        key, value: [B, Hkv, T, D].
        attention_mask: With `segments` a window or None; a model that brings any other mask cannot be packed.
        base: The implementation that serves forwards without `segments`, and picks the kernel for those with.
        segments: Who attends to whom in the flat row.

    Returns:
        [B, T, H, D], and None in place of attention weights.

    Raises:
        PackingError: the layer asks for something that segments do not cover (a mask of its own, soft-capping, sinks,
            position bias).
    """
    if segments is None:
        return attention_function(base)(module, query, key, value, attention_mask, **kwargs)
    _refuse_extras(module, kwargs)
    scale = kwargs.get("scaling")
    window = _window(module, base, attention_mask, kwargs)
    dropout = kwargs.get("dropout") or 0.0
    kernel = choose_kernel(base, query.device, value.dtype, query.shape[-1], dropout)
    return kernel(query, key, value, segments, scale=scale, window=window, dropout=dropout), None


def choose_kernel(
    base: str, device: torch.device, dtype: torch.dtype, head_size: int, dropout: float = 0.0
) -> Callable[..., torch.Tensor]:
    """The function that computes packed attention for these inputs.

    Installed flash-attn when the model asks for it, PyTorch's own varlen kernel on CUDA in half precision,
    `scaled_dot_product_attention` segment by segment everywhere else.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half or head_size > 256 or head_size % 8 or dropout:
        return sdpa_attention
    if base in _FLASH_VERSIONS:
        return partial(flash_attention, version=_FLASH_VERSIONS[base])
    return varlen_attention if has_varlen_attn(device) else sdpa_attention


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
    """The reference: one `scaled_dot_product_attention` per segment, on any device, in any precision."""
    # Split, not sliced: the backward of a slice fills a whole row with zeros, once per segment.
    lengths = [segment.length for segment in segments.segments]
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    place = {(segment.start, segment.end): i for i, segment in enumerate(segments.segments)}
    outputs = []
    for segment, q, k, v in zip(segments.segments, queries, keys, values, strict=True):
        if segment.num_keys > segment.length:
            prefix = place[segment.prefix]
            k, v = torch.cat([keys[prefix], k], dim=2), torch.cat([values[prefix], v], dim=2)
        # A root that fits its window is plainly causal: no mask needed, and the faster kernel.
        plain = segment.num_keys == segment.length and (window is None or segment.length <= window)
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else segments.mask(segment, window),
                is_causal=plain,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


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
    """`torch.nn.attention.varlen.varlen_attn`: one CUDA call, half precision, no flash-attn wheel."""
    ragged = _ragged(query, key, value, segments)
    return call_varlen_attn(*ragged, scale=scale, window_left=_keys_before(window))[None]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentTable,
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
    version: int,
) -> torch.Tensor:
    """The installed flash-attn 2 or 3, for those who ask for it by `attn_implementation`."""
    ragged = _ragged(query, key, value, segments)
    window_size = (_keys_before(window), 0)
    out = flash_attn_function(version)(*ragged, softmax_scale=scale, causal=True, window_size=window_size)
    # flash-attn 3 returns the log-sum-exp too.
    return (out[0] if isinstance(out, tuple) else out)[None]


def _ragged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """The arguments that varlen kernels share: [T, heads, D] in one half precision, keys gathered by segment."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # Under autocast a normalised query (Qwen3) arrives in float32 beside a bfloat16 value.
    q, k = q.to(v.dtype), k.to(v.dtype)
    if segments.kv_index is not None:
        k, v = k.index_select(0, segments.kv_index), v.index_select(0, segments.kv_index)
    lengths = (segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_seqlen_q, segments.max_seqlen_k)
    return (q.contiguous(), k.contiguous(), v.contiguous(), *lengths)


def _keys_before(window: int | None) -> int:
    """Keys before itself that a query sees, as varlen kernels count; -1 for all."""
    return -1 if window is None else window - 1


def _refuse_extras(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for extra in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise PackingError(
                f"{type(module).__name__} uses {extra}, which packed attention does not compute. Set packing=False."
            )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise PackingError(f"{type(module).__name__} is not causal. Packing is for causal models: set packing=False.")


def _window(
    module: torch.nn.Module, base: str, attention_mask: torch.Tensor | WindowMask | None, kwargs: dict[str, Any]
) -> int | None:
    """Return how many keys a query of this layer sees where transformers attends with `base`; None for all.

    flash-attn reads the keyword `sliding_window`, all others the mask; some models (PhiMoE) set only one of them.
    """
    if attention_mask is not None and not isinstance(attention_mask, WindowMask):
        raise PackingError(
            f"{type(module).__name__} attends through a mask of its own, which packed attention does not know. Set "
            "packing=False."
        )
    if "flash" in base:
        return kwargs.get("sliding_window")
    return None if attention_mask is None else attention_mask.size


def _mask(*args: Any, base: str, **kwargs: Any) -> Any:
    """Make an attention mask, in the shape that transformers' `AttentionMaskInterface` wants; packed, only its window.

    Raises:
        PackingError: the mask is neither causal nor a causal sliding window.
    """
    if not _packed.get():
        return mask_function(base)(*args, **kwargs)
    size = kwargs.get("local_size")
    is_chunked = size is not None and size == getattr(kwargs["config"], "attention_chunk_size", None)
    # transformers turns to vmap where a model lays functions of its own over the mask.
    if is_chunked or kwargs.get("use_vmap"):
        raise PackingError(
            f"The attention mask of {type(kwargs['config']).__name__} is neither causal nor a sliding window. Set "
            "packing=False."
        )
    return None if size is None or "flash" in base else WindowMask(size)

"""Attention over the segments of a flat row, registered with transformers as one more attention implementation.

A model whose `config._attn_implementation` is `packed_name("sdpa")` behaves as under "sdpa" until a forward carries
the keyword `segments`; then every layer attends within the segment table. The table travels as an argument, never as
global state, so a recompute under gradient checkpointing sees the segments of its own batch.

Legend: T tokens of the flat row, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trl_ext.compat.transformers import attention_function, mask_function, register_attention
from trl_ext.errors import PackingError
from trl_ext.packing.kernels import choose_kernel
from trl_ext.packing.layout import SegmentTable

SUFFIX = "+packed"

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

"""Attention over the segments of a flat row, registered under the names of transformers' implementations.

An implementation ("sdpa", "flash_attention_2", "kernels-community/flash-attn3", ...) is replaced under its name: a
forward with the keyword `segments` attends within the segment table, every other forward calls the previous function.
The table is an argument, never global state, so a recompute under gradient checkpointing gets the segments of its
batch.

Legend: T tokens of the flat row, H query heads, Hkv key heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.compat.transformers import (
    attention_function,
    flash_varlen_function,
    is_flash,
    mask_function,
    register_attention,
    register_mask,
    search_no_packed_rows,
)
from trl_ext.errors import PackingError
from trl_ext.packing.kernels import choose_kernel, merging_pays
from trl_ext.packing.merge import merged_attention
from trl_ext.packing.recompute import keeping_operations
from trl_ext.packing.table import SegmentTable
from trl_ext.packing.ulysses import heads_to_tokens, keys_to_heads, queries_to_heads

# Set only during a packed forward, and read only where transformers builds masks: it saves [T, T] booleans that the
# segments and the window replace. The variable separates this thread's forward from other threads'. PyTorch's compiler
# cannot read it and reads the number instead.
_packed: ContextVar[bool] = ContextVar("packed", default=False)
_num_packed = 0


@dataclass(frozen=True)
class WindowMask:
    """Replaces the [T, T] mask of a sliding window in a packed forward; a query sees `size` keys, itself the last."""

    size: int


@dataclass(frozen=True)
class AttentionDispatch:
    """The attention implementation `base`, which attends within segments if a forward has them.

    `plain` is the function registered before; it serves forwards without segments.
    """

    base: str
    plain: Callable[..., Any]

    def __call__(self, *args: Any, segments: Any = None, **kwargs: Any) -> Any:
        if isinstance(segments, SegmentTable):
            return attend(*args, base=self.base, segments=segments, **kwargs)
        # Models of other projects may have a keyword of this name.
        return self.plain(*args, **kwargs, **({} if segments is None else {"segments": segments}))


@dataclass(frozen=True)
class MaskDispatch:
    """The mask function of implementation `base`, which makes no [T, T] mask in a packed forward.

    `plain` is the function registered before, if any; it serves all other forwards.
    """

    base: str
    plain: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_packed_forward():
            return window_of_mask(self.base, **kwargs)
        return None if self.plain is None else self.plain(*args, **kwargs)


# The names that `dispatch_on_segments` was called with.
_dispatched: set[str] = set()


def take_segments(config: Any) -> str | None:
    """Make a model attend within segments if a forward has them; idempotent.

    Eager attention is in each model's file and cannot be replaced, so sdpa is used instead, which computes the same.

    Args:
        config: The model's config.

    Returns:
        The name of the model's previous attention implementation, to restore it if the model is not packed.

    Raises:
        PackingError: The implementation cannot be packed.
    """
    before: str | None = config._attn_implementation
    base = config.get_text_config()._attn_implementation
    if base in (None, "eager"):
        dispatch_on_segments("sdpa")
        config._attn_implementation = "sdpa"
    else:
        dispatch_on_segments(base)
    return before


def dispatch_on_segments(base: str) -> None:
    """Replace an attention implementation of transformers under its name, for all models; idempotent.

    Raises:
        PackingError: The implementation is a hub kernel that cannot be loaded or is not flash-attention.
    """
    if "/" in base:
        try:
            is_flash_attention = flash_varlen_function(base) is not None
        except (OSError, ImportError, ValueError) as error:
            raise PackingError(f"The kernel {base} cannot be loaded: {error} Set packing=False.") from error
        if not is_flash_attention:
            raise PackingError(f"The kernel {base} is not one of flash-attention's. Set packing=False.")
    attention, mask = attention_function(base), mask_function(base)
    if not isinstance(attention, AttentionDispatch):
        register_attention(base, AttentionDispatch(base, attention))
    if not isinstance(mask, MaskDispatch):
        register_mask(base, MaskDispatch(base, mask))
    search_no_packed_rows(in_packed_forward)
    _dispatched.add(base)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Mark a model call with `segments`: transformers need not build an attention mask."""
    # transformers registers a hub kernel again when it loads it again, and a user may do so too.
    for base in _dispatched:
        dispatch_on_segments(base)
    global _num_packed
    token = _packed.set(True)
    _num_packed += 1
    try:
        yield
    finally:
        _num_packed -= 1
        _packed.reset(token)


# If compiled, it would be compiled again for every table; without it a layer's rest has one graph for all lengths.
@torch.compiler.disable
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | WindowMask | None,
    *,
    base: str,
    segments: SegmentTable,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one attention layer of a packed forward, with the signature of transformers' `AttentionInterface`.

    Args:
        query: [1, H, T, D]; if processes share the row, only the tokens of this process's part.
        key, value: [1, Hkv, T, D], as `query`.
        attention_mask: A window or None; a model with any other mask cannot be packed.
        base: The model's attention implementation, which decides the kernel.
        segments: The segment table of the flat row.

    Returns:
        [1, T, H, D], and None instead of attention weights.

    Raises:
        PackingError: The layer uses something that segments do not cover (another mask, soft-capping, sinks, position
            bias).
    """
    for extra in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise PackingError(
                f"{type(module).__name__} uses {extra}, which packed attention does not compute. Set packing=False."
            )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise PackingError(f"{type(module).__name__} is not causal. Packing is for causal models: set packing=False.")
    group, num_heads = segments.group, query.shape[1]
    if group is not None:
        key, value = (keys_to_heads(x, group, num_heads) for x in (key, value))
        query, segments = queries_to_heads(query, group), segments.of_line(num_heads)
    if segments.cache is not None:
        through_cache = segments.cache.before if segments.num_cached else segments.cache.store
        key, value = through_cache(module, key, value)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    window = _window(module, base, attention_mask, kwargs)
    dropout = kwargs.get("dropout") or 0.0
    # Kernels support one head size; multi-head latent attention has two. Zeros change neither scores nor values.
    own_size, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_fit(x, size) for x in (query, key, value))
    pays = merging_pays(query.shape[2], segments.num_keys, segments.longest, window)
    kernel = choose_kernel(
        base, query.device, value.dtype, size, dropout, merging_pays=pays, has_window=window is not None
    )
    is_merged = getattr(kernel, "func", None) is merged_attention  # it stores the merged output itself
    with nullcontext() if is_merged else keeping_operations():
        out = kernel(query, key, value, segments, scale=scale, window=window, dropout=dropout)
    out = out if own_size == size else out[..., :own_size]
    return (out if group is None else heads_to_tokens(out, group, num_heads)), None


def _fit(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the heads padded to a size, contiguous in the last dimension as kernels need it."""
    if x.shape[-1] < size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def in_packed_forward() -> bool:
    """Return True inside `packed_forward`."""
    return _num_packed > 0 and (torch.compiler.is_compiling() or _packed.get())


def _window(
    module: torch.nn.Module, base: str, attention_mask: torch.Tensor | WindowMask | None, kwargs: dict[str, Any]
) -> int | None:
    """Return the number of keys that a query of this layer sees, itself included; None for all.

    flash-attn reads the keyword `sliding_window`, others the mask; some models (PhiMoE) set only one of them.

    Args:
        module: The attention layer, for the message.
        base: The implementation that the model was loaded with.
        attention_mask: The layer's mask, which packed attention accepts only as a window.
        kwargs: Keywords of the layer's call.
    """
    if attention_mask is not None and not isinstance(attention_mask, WindowMask):
        raise PackingError(
            f"{type(module).__name__} attends through its own mask, which packed attention does not know. Set "
            "packing=False."
        )
    if is_flash(base):
        return kwargs.get("sliding_window")
    return None if attention_mask is None else attention_mask.size


def window_of_mask(base: str, **kwargs: Any) -> WindowMask | None:
    """Return the window of the mask that a model requests; None for a causal mask.

    Args:
        base: The model's attention implementation.
        kwargs: The arguments of transformers' mask functions.

    Raises:
        PackingError: The mask is neither causal nor a causal sliding window.
    """
    size = kwargs.get("local_size")
    is_chunked = size is not None and size == getattr(kwargs["config"], "attention_chunk_size", None)
    # transformers uses vmap if a model combines the mask with functions of its file.
    if is_chunked or kwargs.get("use_vmap"):
        raise PackingError(
            f"The attention mask of {type(kwargs['config']).__name__} is neither causal nor a sliding window. Set "
            "packing=False."
        )
    return None if size is None or is_flash(base) else WindowMask(size)

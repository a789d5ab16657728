"""Attention over the segments of a flat row, served under the names of transformers' own implementations.

An implementation ("sdpa", "flash_attention_2", "kernels-community/flash-attn3", ...) is registered again under its own
name: a forward with the keyword `segments` attends within the segment table, every other one gets what was registered
before. The table travels as an argument, never as global state, so a recompute under gradient checkpointing sees the
segments of its own batch.

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
)
from trl_ext.errors import PackingError
from trl_ext.packing.kernels import choose_kernel, merging_pays
from trl_ext.packing.merge import merged_attention
from trl_ext.packing.recompute import keeping_operations
from trl_ext.packing.table import SegmentTable
from trl_ext.packing.ulysses import heads_to_tokens, keys_to_heads, queries_to_heads

# Set during a packed forward only, and read only where transformers builds masks: it saves [T, T] booleans, of which
# the segments and the window say everything. PyTorch's compiler reads the number instead, since it cannot read the
# variable, which tells this thread's forward from another's.
_packed: ContextVar[bool] = ContextVar("packed", default=False)
_num_packed = 0


@dataclass(frozen=True)
class WindowMask:
    """Stands for the [T, T] mask of a sliding window in a packed forward.

    Args:
        size: Keys that a query sees, itself the last.
    """

    size: int


@dataclass(frozen=True)
class AttentionDispatch:
    """An attention implementation that attends within segments where a forward brings some.

    Args:
        base: The implementation's name.
        plain: What was registered under it: it serves forwards without segments.
    """

    base: str
    plain: Callable[..., Any]

    def __call__(self, *args: Any, segments: Any = None, **kwargs: Any) -> Any:
        if isinstance(segments, SegmentTable):
            return attend(*args, base=self.base, segments=segments, **kwargs)
        # Another project's models may know a keyword of this name.
        return self.plain(*args, **kwargs, **({} if segments is None else {"segments": segments}))


@dataclass(frozen=True)
class MaskDispatch:
    """A mask function that makes no [T, T] mask in a packed forward.

    Args:
        base: The attention implementation's name.
        plain: What was registered under it, if anything: it serves all other forwards.
    """

    base: str
    plain: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _num_packed and (torch.compiler.is_compiling() or _packed.get()):
            return window_of_mask(self.base, **kwargs)
        return None if self.plain is None else self.plain(*args, **kwargs)


# The names that `dispatch_on_segments` was called for.
_dispatched: set[str] = set()


def take_segments(config: Any) -> str | None:
    """Let a model attend within segments whenever a forward brings some; idempotent.

    Eager attention lives in each model's own file, out of our reach: sdpa takes its place, which computes the same, or
    refuses.

    Args:
        config: The model's config.

    Returns:
        The name of the model's attention implementation before, for the case that it is not packed after all.

    Raises:
        PackingError: its implementation cannot be packed.
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
    """Register an attention implementation of transformers again, under its own name; idempotent, for all models.

    Raises:
        PackingError: the implementation is a kernel from the hub that cannot be loaded, or is not flash-attention's.
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
    _dispatched.add(base)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Around a model call with `segments`: transformers need not build an attention mask."""
    # transformers registers a kernel from the hub anew when it loads it again, and so may a user.
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


# Compiled, it would be compiled again for every table; without it the rest of a layer has one graph for all lengths.
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
    """One attention layer of a packed forward, in the shape that transformers' `AttentionInterface` wants.

    Args:
        query: [1, H, T, D]; where processes share the row, the tokens of this process's part only.
        key, value: [1, Hkv, T, D], as `query`.
        attention_mask: A window or None; a model that brings any other mask cannot be packed.
        base: The model's attention implementation, which picks the kernel.
        segments: Who attends to whom in the flat row.

    Returns:
        [1, T, H, D], and None in place of attention weights.

    Raises:
        PackingError: the layer asks for something that segments do not cover (a mask of its own, soft-capping, sinks,
            position bias).
    """
    _refuse_extras(module, kwargs)
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
    # Kernels know one head size, and multi-head latent attention has two. Zeros add nothing to scores or values.
    own_size, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_fitted(x, size) for x in (query, key, value))
    pays = merging_pays(query.shape[2], segments.num_keys, segments.longest, window)
    kernel = choose_kernel(base, query.device, value.dtype, size, dropout, merging_pays=pays)
    is_merged = getattr(kernel, "func", None) is merged_attention  # which keeps the merged output itself
    with nullcontext() if is_merged else keeping_operations():
        out = kernel(query, key, value, segments, scale=scale, window=window, dropout=dropout)
    out = out if own_size == size else out[..., :own_size]
    return (out if group is None else heads_to_tokens(out, group, num_heads)), None


def _fitted(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the heads padded to a size, the numbers of each side by side in memory as kernels want them."""
    if x.shape[-1] < size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def in_packed_forward() -> bool:
    """Return True inside `packed_forward`."""
    return _packed.get()


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
            f"{type(module).__name__} attends through its own mask, which packed attention does not know. Set "
            "packing=False."
        )
    if is_flash(base):
        return kwargs.get("sliding_window")
    return None if attention_mask is None else attention_mask.size


def window_of_mask(base: str, **kwargs: Any) -> WindowMask | None:
    """Return what a packed forward needs of the mask that a model asks for: its window, or None for a causal one.

    Args:
        base: The model's attention implementation.
        kwargs: The arguments of transformers' mask functions.

    Raises:
        PackingError: the mask is neither causal nor a causal sliding window.
    """
    size = kwargs.get("local_size")
    is_chunked = size is not None and size == getattr(kwargs["config"], "attention_chunk_size", None)
    # transformers turns to vmap where a model lays functions of its own over the mask.
    if is_chunked or kwargs.get("use_vmap"):
        raise PackingError(
            f"The attention mask of {type(kwargs['config']).__name__} is neither causal nor a sliding window. Set "
            "packing=False."
        )
    return None if size is None or is_flash(base) else WindowMask(size)

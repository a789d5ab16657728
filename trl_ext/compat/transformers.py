"""transformers: attention by name, and who divides the loss."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

# A filter of Python's for warnings that only TRL can heed, whose code and configs use the old names.
_OLD_NAMES = re.compile(r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated", re.IGNORECASE)
_OLD_NAMES_UNSAID = ("ignore", _OLD_NAMES, FutureWarning, None, 0)


@contextmanager
def old_names_unsaid() -> Iterator[None]:
    """Leave out inside the block what transformers says of old names; other filters stay, also those set inside."""
    filters: Any = warnings.filters
    if is_new := _OLD_NAMES_UNSAID not in filters:
        filters.insert(0, _OLD_NAMES_UNSAID)
    try:
        yield
    finally:
        if is_new and _OLD_NAMES_UNSAID in warnings.filters:
            warnings.filters.remove(_OLD_NAMES_UNSAID)  # type: ignore[attr-defined]


def attention_function(name: str) -> Callable[..., Any]:
    """Return the function that is registered for an attention implementation."""
    return ALL_ATTENTION_FUNCTIONS[name]


def mask_function(name: str) -> Callable[..., Any] | None:
    """Return the mask function that is registered for an attention implementation; None where it needs no mask."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Make a function serve the attention implementation `name` in all models of this process."""
    AttentionInterface.register(name, attention)


def register_mask(name: str, mask: Callable[..., Any]) -> None:
    """Make a function build the masks of the attention implementation `name` in all models of this process."""
    AttentionMaskInterface.register(name, mask)


def is_flash(name: str) -> bool:
    """Return True for flash-attention of any version, from a package or the hub."""
    return is_flash_attention_requested(requested_attention_implementation=name)


@cache
def flash_varlen_function(name: str) -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of the package or the kernel from the hub that serves `name`; None without one.

    Raises:
        ImportError, ValueError: transformers cannot load it.
    """
    functions, *_ = lazy_import_flash_attention(name)
    return functions[1]

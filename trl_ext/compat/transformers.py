"""transformers: attention by name, and who divides the loss."""

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested


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

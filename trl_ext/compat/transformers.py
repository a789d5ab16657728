"""transformers: attention by name, and parameters of any model."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from trl_ext.errors import SupportError

# A warning filter for deprecated names that TRL's code and configs use; users cannot act on these warnings.
_OLD_NAMES = re.compile(r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated", re.IGNORECASE)
_OLD_NAMES_UNSAID = ("ignore", _OLD_NAMES, FutureWarning, None, 0)


@contextmanager
def old_names_unsaid() -> Iterator[None]:
    """Hide transformers' warnings about old names in the block; other filters stay, also new ones of the block."""
    filters: Any = warnings.filters
    if is_new := _OLD_NAMES_UNSAID not in filters:
        filters.insert(0, _OLD_NAMES_UNSAID)
    try:
        yield
    finally:
        if is_new and _OLD_NAMES_UNSAID in warnings.filters:
            warnings.filters.remove(_OLD_NAMES_UNSAID)  # type: ignore[attr-defined]


def attention_function(name: str) -> Callable[..., Any]:
    """Return the function of an attention implementation."""
    return ALL_ATTENTION_FUNCTIONS[name]


def mask_function(name: str) -> Callable[..., Any] | None:
    """Return the mask function of an attention implementation; None if it needs no mask."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Use a function for the attention implementation `name` in all models of this process."""
    AttentionInterface.register(name, attention)


def register_mask(name: str, mask: Callable[..., Any]) -> None:
    """Use a function for the masks of the attention implementation `name` in all models of this process."""
    AttentionMaskInterface.register(name, mask)


def search_no_packed_rows(inside: Callable[[], bool]) -> None:
    """Let transformers not search positions for rows of its kind of packing where `inside` is True; idempotent.

    Its masks need the answer on the host, which waits for the card; forwards inside need no mask.
    """
    plain = masking_utils.find_packed_sequence_indices
    if getattr(plain, "inside", None) is inside:
        return

    @wraps(plain)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if inside() else plain(position_ids)

    find.inside = inside  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find


def is_flash(name: str) -> bool:
    """Return True for flash-attention of any version, from a package or the hub."""
    return is_flash_attention_requested(requested_attention_implementation=name)


@cache
def flash_varlen_function(name: str) -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of the package or hub kernel of `name`; None if there is none.

    Raises:
        ImportError, ValueError: transformers cannot load it.
    """
    functions, *_ = lazy_import_flash_attention(name)
    return functions[1]


def call_flash(function: Callable[..., Any], *qkv: torch.Tensor, **options: Any) -> Any:
    """Call a function of flash-attention with the options that its version takes."""
    known = _parameters(function)
    return function(*qkv, **{name: value for name, value in options.items() if name in known})


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)  # operators of PyTorch's


@cache
def flash_backward_function(name: str) -> Callable[..., Any]:
    """Return the function that computes gradients from output and log-sum-exp; AttributeError if there is none."""
    module = sys.modules.get(getattr(flash_varlen_function(name), "__module__", ""))
    for function in ("_flash_attn_bwd", "_flash_attn_varlen_backward", "_flash_attn_backward"):  # of versions 4, 2, 3
        if hasattr(module, function):
            return getattr(module, function)
    raise AttributeError(f"{name} has no backward by itself")


def is_kernel(function: Callable[..., Any]) -> bool:
    """Return True if a model file's function is a kernel, False if it is transformers' PyTorch code.

    Args:
        function: Takes `cu_seqlens` or `seq_idx`, and other arguments without which it cannot compute.
    """
    try:
        function(cu_seqlens=0, seq_idx=0)
    except ValueError:  # transformers' code supports no sequences, and refuses them first
        return False
    except (TypeError, LookupError, AttributeError):  # all other arguments are missing
        pass
    # Before transformers 5.2x its code ignored them.
    kept = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return bool(kept.get("is_new_implementation", True))


def count_params(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Count the parameters of a config.json's model, on transformers' class on the meta device, without weights.

    Returns:
        Number of parameters, with tied weights once and with vision towers; and the language model's full config.

    Raises:
        SupportError: The installed transformers does not know the model, or cannot build it from this config.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise SupportError(f"transformers {transformers.__version__} does not know '{kind}'.")
    keys = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        made = CONFIG_MAPPING[kind].from_dict(keys)
        named = getattr(transformers, (config.get("architectures") or [""])[0] or "", None)
        with torch.device("meta"):
            model = named(made) if named else AutoModelForCausalLM.from_config(made)
    # transformers' classes may raise any of these for a foreign config.
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise SupportError(f"transformers cannot make a '{kind}' of its config: {reason}.") from error
    return sum(weight.numel() for weight in model.parameters()), made.get_text_config().to_dict()

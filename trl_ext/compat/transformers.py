"""transformers: attention by name, generation that reads a prompt once, and parameters of any model."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from trl_ext.compat.swap import swapped
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


def prompts_read_once(model: Any) -> AbstractContextManager[None]:
    """Let the model's `generate` read equal prompts of a batch once in the block, not once for each completion.

    Unchanged: images, models whose caches are more than keys and values of all tokens, settings that choose a cache,
    and forwards that draw random numbers (dropout, NEFTune), which each completion's prompt draws for itself.
    """
    generate = model.generate

    def after_cached_prompts(input_ids: Any, attention_mask: Any, generation_config: Any, **others: Any) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        is_other = bool(others) or _chooses_cache(generation_config, model.generation_config)
        cache = {} if is_other else _cache_of_prompts(model, **inputs)
        return generate(**inputs, generation_config=generation_config, **others, **cache)

    return swapped(model, generate=after_cached_prompts)


def prompts_forked(model: Any) -> AbstractContextManager[None]:
    """Let the model's `generate_batch` read equal prompts of a batch once in the block, not for each completion."""
    initialize = model.init_continuous_batching

    def initialize_forking(*args: Any, **kwargs: Any) -> Any:
        manager = initialize(*args, **kwargs)
        manager.add_requests = partial(_add_forking_requests, manager)
        return manager

    return swapped(model, init_continuous_batching=initialize_forking)


def _add_forking_requests(manager: Any, inputs: Sequence[Sequence[int]], **options: Any) -> list[str]:
    """Add one request for equal prompts, which is forked once they are read; return the names of the rows' requests.

    Forks share the prompt's part of the cache. transformers reads a prompt's last token after the fork, and fails at a
    forward without tokens. A prompt is therefore not forked if all tokens but its last one fill whole pages of the
    cache, which other prompts with the same beginning may have filled already.
    """
    config = manager.continuous_batching_config
    page_size = getattr(config, "page_size", None) or config.block_size  # before transformers 5.2x renamed it
    rows_of_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(inputs):
        rows_of_prompt.setdefault(tuple(ids), []).append(row)
    names = [""] * len(inputs)
    for prompt, rows in sorted(rows_of_prompt.items(), reverse=True):  # in transformers' order
        size = 1 if len(prompt) % page_size == 1 else len(rows)
        manager.num_return_sequences = size
        parents = type(manager).add_requests(manager, [list(prompt)] * (len(rows) // size), **options)
        for place, row in enumerate(rows):
            parent, fork = parents[place // size], place % size
            names[row] = f"{parent}__child#{fork - 1}" if fork else parent
    return names


def _chooses_cache(*configs: Any) -> bool:
    """Return True if settings, of which earlier ones win, choose a cache other than one of all tokens per row."""
    implementation, uses, beams = (
        next((value for config in configs if (value := getattr(config, name, None)) is not None), None)
        for name in ("cache_implementation", "use_cache", "num_beams")
    )
    return implementation is not None or uses is False or (beams or 1) > 1


def _cache_of_prompts(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
    """Return the cache of the prompts without their last token, by the name of its argument; {} if there is none.

    Args:
        input_ids, attention_mask: [B, T], padded on the left.
    """
    length = input_ids.shape[1]
    prompts, prompt_of_row = torch.unique(torch.cat((input_ids, attention_mask), 1), dim=0, return_inverse=True)
    plain = DynamicCache(config=model.config.get_text_config(decoder=True))
    if len(prompts) == len(input_ids) or length < 2 or not _holds_all_tokens(plain):
        return {}
    ids, mask = prompts[:, : length - 1], prompts[:, length:-1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    before = torch.get_rng_state()
    outputs = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        return {}
    name = "cache" if "cache" in outputs else "past_key_values"  # before transformers 5.2x renamed it
    cache = outputs.get(name)
    if not _holds_all_tokens(cache):
        return {}
    cache.batch_select_indices(prompt_of_row)
    return {name: cache}


def _holds_all_tokens(cache: Any) -> bool:
    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", (None,)))


def compiled_decoding(model: Any, step_tokens: int) -> AbstractContextManager[None]:
    """Let the model's `generate` compile decoding in the block, for caches of few lengths.

    transformers compiles it on cards if the cache is static, whose length becomes a multiple of `step_tokens`.

    Issue: TRL sets disable_compile=True, with which a static cache only takes memory.
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL compiles decoding if the cache is static.
    """
    generate = model.generate

    def in_steps(input_ids: Any, generation_config: Any, **others: Any) -> Any:
        longest = input_ids.shape[1] + (generation_config.max_new_tokens or 0)
        length = -(-longest // step_tokens) * step_tokens
        with swapped(generation_config, disable_compile=False, max_cache_len=length):
            return generate(input_ids=input_ids, generation_config=generation_config, **others)

    return swapped(model, generate=in_steps)


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

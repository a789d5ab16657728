"""transformers' `generate` without forwards whose results are known: of equal prompts, and of rows that have ended.

B rows of the batch, R of them in the cache, T tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import (
    GenerationMode,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_ext.compat.swap import swapped

_CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.2x renamed it
# Logits processors, of the settings that TRL has, for which no row depends on others or on its place in the batch.
_BY_ROW = (
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def known_rows_skipped(model: Any) -> AbstractContextManager[None]:
    """Let the model's `generate` read equal prompts once, and forward only rows that have not ended, in the block.

    The tokens, and the random numbers drawn for them, are the same as without. On a card rows are dropped, too:
    `generate` waits for the card after each token anyway, and dropping copies no more than the cache does for a token.

    Unchanged: images, models whose caches are more than keys and values of all tokens, settings that choose a cache or
    return more than tokens, beams and assisted decoding, and forwards that draw random numbers (dropout, NEFTune).
    """
    generate = model.generate

    def without_known_rows(input_ids: Any, attention_mask: Any, generation_config: Any, **others: Any) -> Any:
        merged = _with_defaults(generation_config, model.generation_config)
        if not others and _is_plain(merged):
            others = _cache_of_prompts(model, input_ids, attention_mask, merged.prefill_chunk_size)
            others["custom_generate"] = _sample_living_rows
        return generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **others
        )

    return swapped(model, generate=without_known_rows)


def weights_cast_once(model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Let the model's `generate` cast float32 weights once in the block, not in each forward, and hold the copies.

    PyTorch keeps weights that autocast has cast until the outermost autocast ends, which is a forward's without this.

    Args:
        model: Its forward is autocast.
        autocast: Returns the same autocast.
    """
    generate = model.generate

    def casting_once(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return generate(*args, **kwargs)

    return swapped(model, generate=casting_once)


def _with_defaults(config: GenerationConfig, defaults: GenerationConfig) -> GenerationConfig:
    """Return a copy whose settings that were left open are the model's."""
    merged = deepcopy(config)
    merged.update(**defaults.to_dict(), defaults_only=True)
    return merged


def _is_plain(config: GenerationConfig) -> bool:
    """Return True if settings give tokens alone, one at a time, and leave the cache to the model."""
    is_sampled = config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    has_cache_of_model = config.cache_implementation is None and config.use_cache is not False
    return is_sampled and has_cache_of_model and not config.return_dict_in_generate


# Equal prompts -----------------------------------------------------------------------------------------------------


def _cache_of_prompts(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, chunk_size: int | None
) -> dict[str, Any]:
    """Return the cache of the prompts without their last token, by the name of its argument; {} if there is none.

    Args:
        model: The policy.
        input_ids, attention_mask: [B, T], padded on the left.
        chunk_size: Tokens that a forward may read at once; None: all. transformers up to 5.17 reads all chunks again
            after a cache, so with a size there is none.
    """
    length = input_ids.shape[1]
    prompts, prompt_of_row = torch.unique(torch.cat((input_ids, attention_mask), 1), dim=0, return_inverse=True)
    plain = DynamicCache(config=model.config.get_text_config(decoder=True))
    if chunk_size is not None or len(prompts) == len(input_ids) or length < 2 or not _holds_all_tokens(plain):
        return {}
    ids, mask = prompts[:, : length - 1], prompts[:, length:-1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    card = [] if ids.device.type == "cpu" else [ids.device]
    with torch.random.fork_rng(card, device_type=ids.device.type), torch.no_grad():
        before = _random_state(ids.device)
        outputs = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        draws = not torch.equal(before, _random_state(ids.device))
    cache = _cache_in(outputs)
    if draws or not _holds_all_tokens(cache):
        return {}
    cache.batch_select_indices(prompt_of_row)
    return {"cache" if "cache" in outputs else "past_key_values": cache}


def _holds_all_tokens(cache: Any) -> bool:
    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", (None,)))


def _cache_in(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among a model's inputs or outputs; None if there is none."""
    return next((inputs[name] for name in _CACHE_NAMES if name in inputs), None)


def _random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the processor's generator, and of the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


# Rows that have ended ----------------------------------------------------------------------------------------------


def _sample_living_rows(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
) -> torch.Tensor:
    """Return [B, T] as the model's `_sample` does, from forwards of the rows that have not ended.

    `generate` calls it instead of `_sample` with all that it has prepared. Random
    numbers are drawn for all rows, as `torch.multinomial` does, so that living rows get the same as without dropping.

    Args:
        model: The policy.
        input_ids: [B, P].
        logits_processor, stopping_criteria, generation_config: As `generate` has prepared them.
        inputs: Further inputs of the model.
    """
    positions = inputs.get("position_ids")
    is_text = positions is None or positions.dim() == 2  # three dimensions in models for images
    has_ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    if not (has_ends and is_text and _holds_all_tokens(_cache_in(inputs))):
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **inputs)

    num_rows, is_by_row = len(input_ids), all(isinstance(processor, _BY_ROW) for processor in logits_processor)
    is_living = torch.ones_like(input_ids[:, 0], dtype=torch.bool)  # [R]
    rows = is_living.nonzero()[:, 0]  # [R]
    ids = whole = input_ids
    pad = generation_config._pad_token_tensor
    before = _random_state(ids.device)
    outputs = model._prefill(ids, generation_config, inputs, is_first_iteration=True)
    draws = not torch.equal(before, _random_state(ids.device))
    with model._optimize_model_for_decode():
        while True:
            inputs = model._update_model_kwargs_for_generation(outputs, inputs)
            logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device)  # [R, V]
            del outputs  # the prefill may return logits of all tokens
            if is_by_row:
                scores = logits_processor(ids, logits)
            else:
                of_batch = logits.new_zeros(num_rows, logits.shape[1]).index_copy_(0, rows, logits)
                scores = logits_processor(whole, of_batch)[rows]
            tokens = _next_tokens(scores, rows, num_rows if generation_config.do_sample else 0)
            tokens = torch.where(is_living, tokens, pad)
            ids = torch.cat((ids, tokens[:, None]), dim=1)
            whole = torch.cat((whole, pad.repeat(num_rows).index_copy(0, rows, tokens)[:, None]), dim=1)
            is_living = is_living & ~stopping_criteria(ids, None)
            num_living = int(is_living.sum())
            if num_living == 0:
                return whole
            if num_living < len(rows) and not draws:
                kept = is_living.nonzero()[:, 0]
                rows, ids, is_living = rows[kept], ids[kept], is_living[kept]
                _cache_in(inputs).batch_select_indices(kept)
                by_row = [name for name in ("attention_mask", "position_ids") if inputs.get(name) is not None]
                inputs |= {name: inputs[name][kept] for name in by_row}
            outputs = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs))


def _next_tokens(scores: torch.Tensor, rows: torch.Tensor, num_drawn: int) -> torch.Tensor:
    """Return a token for each row [R]: the likeliest, or one drawn as `torch.multinomial` draws it in a whole batch.

    Args:
        scores, rows: [R, V], and [R] places of the rows in the batch.
        num_drawn: Rows of the batch for which random numbers are drawn; 0 takes the likeliest tokens.
    """
    if not num_drawn:
        return scores.argmax(-1)
    if num_drawn == len(rows):
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
    noise, probabilities = scores.new_empty(num_drawn, scores.shape[1]).exponential_(), scores.softmax(-1)
    if not probabilities.isfinite().all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")  # as `multinomial`
    return (probabilities / noise[rows]).argmax(-1)


# Other engines -----------------------------------------------------------------------------------------------------


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

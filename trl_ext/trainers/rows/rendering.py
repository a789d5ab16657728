"""Prompts as the model will read them: through the chat template, and no longer than the model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from jinja2 import TemplateError
from transformers.utils import logging

from trl_ext.trainers.rows.screen import batches, num_bytes, role_sequences
from trl_ext.trainers.rows.sentence import named, refuse

logger = logging.get_logger(__name__)

# Tokenizing takes longest: of the prompts that may be too long, those with most bytes are measured.
MAX_MEASURED = 1000
# What a chat template adds to a prompt and to each message: more than those in use.
_TOKENS_PER_CHAT, _TOKENS_PER_MESSAGE = 128, 16


def check_rendered(dataset: Dataset, role: str, tokenizer: Any, config: Any, args: Any) -> None:
    """Raise DataError for prompts that the chat template refuses, or that are too long for the model.

    Args:
        dataset: Rows whose prompts are good, and all text or all messages.
        role: What the message calls the dataset.
        tokenizer: The policy's.
        config: The policy's; None if it is not known.
        args: The trainer's config.
    """
    options = {"add_generation_prompt": True, **(getattr(args, "chat_template_kwargs", None) or {})}
    prompts = dataset.select_columns(["prompt"]).with_format(None)
    sizes, sequences = [], dict[str, int]()
    for start, column in batches(dataset, "prompt"):
        sizes.append(num_bytes(column, _TOKENS_PER_CHAT, _TOKENS_PER_MESSAGE))
        for roles, row in role_sequences(column).items():
            sequences.setdefault(roles, start + row)
    for roles, row in sequences.items():
        try:
            tokenizer.apply_chat_template(prompts[row]["prompt"], tokenize=False, **options)
        except (TemplateError, TypeError) as error:
            advice = f"The chat template refuses them: {error}. Change the messages, or give another template."
            refuse({f"messages from {roles}": [row]}, role, advice)
    limit, most = positions(config), args.max_completion_length or 0
    if limit is None:
        return
    bound = np.concatenate(sizes)
    rows = np.argsort(-bound, kind="stable")[: min(MAX_MEASURED, int((bound > limit - most).sum()))]
    if len(rows):
        texts = list(prompts[np.sort(rows).tolist()]["prompt"])
        lengths = dict(zip(np.sort(rows).tolist(), num_tokens(texts, tokenizer, options), strict=True))
        _check_lengths(lengths, role, limit, most, is_hard=not has_rotary(config))


def num_tokens(prompts: list[Any], tokenizer: Any, chat_options: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each prompt as TRL gives it to the model."""
    if isinstance(prompts[0], str):
        ids = tokenizer(text=prompts)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompts, tokenize=True, return_dict=True, **chat_options)["input_ids"]
    return [len(tokens) for tokens in ids]


def _check_lengths(lengths: Mapping[int, int], role: str, limit: int, most: int, is_hard: bool) -> None:
    longest = max(lengths.values())
    full = [row for row, length in lengths.items() if length >= limit]
    tight = [row for row, length in lengths.items() if length > limit - most]
    if full or (tight and is_hard):
        room = "a token" if full else f"a completion of max_completion_length={most} tokens"
        problem = f"a prompt that leaves no room for {room}: the model reads {limit} tokens"
        refuse({problem: full or tight}, role, f"The longest has {longest}. Drop or shorten such rows.")
    if tight:
        logger.warning(
            f"{role}: in {named(tight)} the prompt (at most {longest} tokens) and max_completion_length={most} "
            f"together go beyond the {limit} tokens that the model has learnt to read. Shorten such rows, or lower "
            "max_completion_length."
        )


def positions(config: Any) -> int | None:
    """Return how many tokens the model reads at most; None where it has no bound."""
    text = None if config is None else config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    if not isinstance(known, int) or known <= 0:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    scalings = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    stretched = [
        (part.get("original_max_position_embeddings") or known) * (part.get("factor") or 1) for part in scalings
    ]
    return max(known, *map(int, stretched))


def has_rotary(config: Any) -> bool:
    """Return True for a model that takes positions beyond its bound, if it has never learnt them."""
    return bool(getattr(config.get_text_config(), "rope_parameters", None))

"""Checks of rows as the model reads them: the chat template, the vocabulary and the length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from jinja2 import TemplateError
from transformers.utils import logging

from trl_ext.trainers.rows.screen import batches, have_no_tokens, num_bytes, role_sequences
from trl_ext.trainers.rows.sentence import named, parts, refuse

logger = logging.get_logger(__name__)

# Tokenizing is slow: of the prompts that may be too long, only the ones with most bytes are tokenized.
MAX_MEASURED = 1000
# Tokens that a chat template adds to a prompt and to each message: more than any template in use.
_TOKENS_PER_CHAT, _TOKENS_PER_MESSAGE = 128, 16
# Column with the number of each row before any was dropped.
_ROW = "row"


def check_rendered(dataset: Dataset, role: str, tokenizer: Any, config: Any, args: Any) -> None:
    """Raise DataError for prompts that the chat template refuses, or that are too long for the policy.

    All prompts must be text, or all messages.

    Args:
        dataset: The rows.
        role: The dataset in messages: "train_dataset".
        tokenizer: With the chat template.
        config: The policy's; None if it is not known.
        args: The run's config.
    """
    options = _chat_options(getattr(args, "chat_template_kwargs", None))
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
        # With rotary embeddings a model accepts positions beyond its limit, although it was not trained on them.
        is_hard = not getattr(config.get_text_config(), "rope_parameters", None)
        _check_lengths(lengths, role, limit, most, is_hard)


def render_prompt(prompt: Any, tokenizer: Any, chat_options: Mapping[str, Any] | None) -> str:
    """Return the text that the model reads before its answer; messages unchanged if no template accepts them."""
    if not isinstance(prompt, list) or not getattr(tokenizer, "chat_template", None):
        return str(prompt)
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **_chat_options(chat_options)))
    except (TemplateError, TypeError):  # `check_rendered` reports it
        return str(prompt)


def _chat_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return keywords of `apply_chat_template` for a prompt; the user's may turn the generation prompt off."""
    return {"add_generation_prompt": True, **(given or {})}


def num_tokens(prompts: list[Any], tokenizer: Any, chat_options: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each prompt, tokenized as in TRL."""
    if isinstance(prompts[0], str):
        ids = tokenizer(text=prompts)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompts, tokenize=True, return_dict=True, **chat_options)["input_ids"]
    return [len(tokens) for tokens in ids]


def _check_lengths(lengths: Mapping[int, int], role: str, limit: int, most: int, is_hard: bool) -> None:
    """Raise DataError for prompts that leave no room for a completion; warn if the model can read on.

    Args:
        lengths: Tokens of prompts, by row.
        role: The dataset in messages.
        limit: Tokens that the model reads.
        most: Tokens of the longest completion; 0 if unknown.
        is_hard: Whether the model cannot read beyond the limit.
    """
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
    """Return the most tokens that the model reads; None if it has no limit."""
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


def check_tokens(datasets: Any, role: str, columns: Sequence[str], config: Any) -> None:
    """Raise DataError for token ids outside the model's vocabulary, and for rows that are too long for it.

    Args:
        datasets: A dataset, or a dict of datasets; streams and None are not checked.
        role: The dataset in messages.
        columns: Names of the columns with token ids.
        config: The model's.
    """
    limit, vocabulary = positions(config), config.get_text_config().vocab_size
    for name, dataset in parts(datasets, role):
        for column in columns if isinstance(dataset, Dataset) else ():
            check_ids(dataset, name, column, vocabulary)
            if limit is None:
                continue
            lengths = [pc.list_value_length(ids).to_numpy(zero_copy_only=False) for _, ids in batches(dataset, column)]
            if rows := np.flatnonzero(np.concatenate(lengths) > limit).tolist():
                advice = f"Set max_length to {limit} or less, or drop such rows."
                problem = f"more {column} than the {limit} tokens that the model reads"
                refuse({problem: _as_given(dataset, rows)}, name, advice)


def check_ids(dataset: Dataset, role: str, column: str, vocabulary: int) -> None:
    """Raise DataError for rows without token ids, and for ids outside the vocabulary.

    Args:
        dataset: The rows.
        role: The dataset in messages.
        column: Its name.
        vocabulary: Number of tokens.
    """
    missing: list[int] = []
    foreign: list[int] = []
    for start, ids in batches(dataset, column):
        empty = have_no_tokens(ids)
        missing += (np.flatnonzero(empty) + start).tolist()
        if empty.all():
            continue
        bounds = pc.min_max(tokens := ids.flatten())
        if tokens.null_count or bounds["min"].as_py() < 0 or bounds["max"].as_py() >= vocabulary:
            known = range(vocabulary)
            for number, row in enumerate(ids.to_pylist(), start):
                if any(token not in known for token in row or ()):
                    foreign.append(number)
    found = {f"no {column}": missing, f"{column} outside the {vocabulary} tokens of the vocabulary": foreign}
    found = {problem: _as_given(dataset, rows) for problem, rows in found.items() if rows}
    if found:
        refuse(found, role, "Tokenize with the model's own tokenizer, and drop rows that have no tokens.")


def _as_given(dataset: Dataset, rows: list[int]) -> list[int]:
    """Return the rows' numbers in the user's dataset."""
    return list(dataset[rows][_ROW]) if rows and _ROW in dataset.column_names else rows

"""Checks of the RewardTrainer's preference pairs: of a dataset before tokenization, of a stream as rows arrive."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.trainers.rows.screen import rows_where
from trl_ext.trainers.rows.sentence import columns_of_all, listed, refuse
from trl_ext.trainers.rows.text import TextCheck, is_blank, warn_of_two_begins

logger = logging.get_logger(__name__)

_SIDES = ("chosen", "rejected")
_TOKENS = ("chosen_ids", "rejected_ids")
# Former names, which TRL still takes.
_LEGACY = ("chosen_input_ids", "rejected_input_ids")
ACCEPTED = (("prompt", "chosen", "rejected"), ("chosen", "rejected"), _TOKENS)
_EMPTY, _EQUAL = "an empty side", "a chosen side that equals the rejected one"
_MIXED = "text next to messages"
_OTHER_TURNS = "sides with different user turns"
_MAX_MARGIN = 1e4  # scores differ by a few units


def check_columns(dataset: Any, role: str) -> None:
    """Raise DataError unless the dataset has rows, and the columns of preference pairs."""
    for name, _, columns in columns_of_all(dataset, role):
        if shown := [column for column in ("image", "images") if column in columns]:
            raise DataError(
                f"{name} has the column {listed(shown)}, and reward models are trained on text: TRL's RewardTrainer "
                f"reads no images. Drop it, if pairs make sense without: dataset.remove_columns('{shown[0]}')."
            )
        if not any(set(names) <= set(columns) for names in (*ACCEPTED, _LEGACY)):
            accepted = "; ".join(" and ".join(map(repr, names)) for names in ACCEPTED)
            raise DataError(
                f"{name} has the columns {listed(sorted(columns))}, which make no preference pairs. "
                f"Accepted are: {accepted}; each with or without 'margin'. Rename them: in a recipe columns: "
                "{chosen: ..., rejected: ...}, else dataset.rename_column(old, new)."
            )


def with_answers_as_messages(dataset: Any) -> Any:
    """Return pairs in which text after a prompt of messages is the assistant's last message; other pairs unchanged."""
    first: Mapping[str, Any] = next(iter(dataset), {})
    if not _is_chat(first.get("prompt")) or not all(isinstance(first.get(side), str) for side in _SIDES):
        return dataset
    return dataset.map(lambda row: {side: _as_message(row[side]) for side in _SIDES})


def _as_message(side: Any) -> Any:
    return [{"role": "assistant", "content": side}] if isinstance(side, str) else side


def check_pairs(dataset: Any, role: str, tokenizer: Any = None) -> None:
    """Raise DataError for columns, prompts, sides or margins that cannot be used for training.

    Of a stream only the first row is checked. Without `tokenizer`, special tokens and the chat template are not.
    """
    check_columns(dataset, role)
    check = TextCheck.of(tokenizer, is_answer=True)
    is_stream = isinstance(dataset, IterableDataset)
    rows: Any = [(0, next(iter(dataset)))] if is_stream else rows_where(dataset, _read(dataset))
    found: dict[str, list[int]] = {}
    first = None
    for row, pair in rows:
        first = first or pair
        for problem in problems(pair, check, first):
            found.setdefault(problem, []).append(row)
    if found:
        advice = "Drop or mend such rows: dataset.filter(...)."
        if set(found) <= {_EMPTY, _EQUAL, _OTHER_TURNS}:
            advice = "Drop such pairs: pairs, report = trl_ext.filter_pairs(dataset)."
        elif _MIXED in found:
            advice = "Messages that begin with the prompt need no such column: in a recipe columns: {prompt: null}."
        refuse(found, role, advice)
    first = next(iter(dataset if is_stream else dataset.select_columns(_read(dataset))))
    if tokenizer is None or token_columns(first):
        return
    if not _is_chat(first["chosen"]):
        return warn_of_two_begins(first.get("prompt", "") + first["chosen"], role, tokenizer)
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{role} holds messages, and the tokenizer has no chat template. Give a tokenizer with one "
            "(tokenizer.chat_template = ...), set chat_template_path, or give pairs that are text."
        )
    with refused_by_template([first], role, tokenizer):
        _render(first, tokenizer)


@contextmanager
def refused_by_template(dataset: Any, role: str, tokenizer: Any) -> Iterator[None]:
    """Turn a chat template's error within the block into a DataError that names the first refused row."""
    try:
        yield
    except (TemplateError, TypeError) as error:
        for row, pair in enumerate(dataset):
            try:
                _render(pair, tokenizer)
            except (TemplateError, TypeError):
                refuse(
                    {f"messages that the chat template refuses: {error}": [row]},
                    role,
                    "Drop such rows, change their messages, or give another template.",
                )
        raise


def _render(pair: Mapping[str, Any], tokenizer: Any) -> None:
    options = dict(pair.get("chat_template_kwargs") or {})
    tools = options.pop("tools", None)
    for side in _SIDES:
        messages = [*pair.get("prompt", []), *pair.get(side, [])]
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def without_bad_pairs(dataset: Any, role: str, tokenizer: Any = None) -> Any:
    """Return a stream without the pairs that `check_pairs` would refuse; return anything else unchanged."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    check = TextCheck.of(tokenizer, is_answer=True)

    def is_good(row: Mapping[str, Any]) -> bool:
        found = next(problems(row, check), None)
        if found:
            logger.warning_once(f"{role}: a pair with {found} came along; such pairs are left out of the stream.")
        return found is None

    return dataset.filter(is_good)


def problems(row: Mapping[str, Any], check: TextCheck, first: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the problems of a pair, in words that follow "row 7 has". All pairs must be of the kind of `first`."""
    tokens = token_columns(row)
    chosen, rejected = (row[name] for name in tokens or ("chosen", "rejected"))
    if _is_empty(chosen) or _is_empty(rejected):
        yield _EMPTY
    elif chosen == rejected:
        yield _EQUAL
    elif not tokens and (found := _problem_of_texts(row, check, first or row)):
        yield found
    margin = row.get("margin", 0.0)
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        yield "a margin that is no finite number"
    elif not 0 <= margin <= _MAX_MARGIN:
        yield f"a margin that is not from 0 to {_MAX_MARGIN:g}"


def _problem_of_texts(row: Mapping[str, Any], check: TextCheck, first: Mapping[str, Any]) -> str:
    for name in ("chosen", "rejected"):
        if found := check.problem(row[name], f"{name} side"):
            return found
    # An explicit prompt may be blank.
    if row.get("prompt", []) != [] and (found := TextCheck(may_be_blank=True).problem(row["prompt"], "prompt")):
        return found
    kinds = [_is_chat(row[name]) for name in ("prompt", "chosen", "rejected") if name in row]
    if len(set(kinds)) > 1:
        return _MIXED
    if kinds[0] != _is_chat(first["chosen"]):
        return f"{'messages' if kinds[0] else 'text'}, where the first row has {'text' if kinds[0] else 'messages'}"
    for name in ("chosen", "rejected") if kinds[0] else ():
        if row[name][-1]["role"] == "user":
            return f"a {name} side that ends with the user, and so without an answer"
    has_prompt = "prompt" in row  # then it is the prompt of both sides
    if kinds[0] and not has_prompt and _user_turns(row["chosen"]) != _user_turns(row["rejected"]):
        return _OTHER_TURNS
    return ""


def _user_turns(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "user"]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list)


def _is_empty(side: Any) -> bool:
    """Return True for blank text, no tokens, no messages, or a last message without content."""
    if side is None or (isinstance(side, str | Sequence) and not side):
        return True
    if isinstance(side, str):
        return is_blank(side)
    if isinstance(side, Sequence) and isinstance(side[-1], Mapping):
        content = side[-1].get("content")
        calls_a_tool = bool(side[-1].get("tool_calls"))
        return not calls_a_tool and (not content or (isinstance(content, str) and is_blank(content)))
    return False


def token_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of tokens that TRL would train on; empty if TRL would tokenize."""
    return next((names for names in (_TOKENS, _LEGACY) if set(names) <= set(columns)), ())


def _read(dataset: Dataset) -> list[str]:
    names = token_columns(dataset.column_names) or ("prompt", "chosen", "rejected")
    return [name for name in (*names, "margin") if name in dataset.column_names]

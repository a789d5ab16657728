"""The part of `trl-ext check` about data: check the rows as the trainer does, show eight of them, measure lengths."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.errors import DataError, TrlExtError
from trl_ext.scripts import training
from trl_ext.scripts.data.dataset import Splits
from trl_ext.scripts.training import AS_MEANT, NOT_APPLIED, ROLES, look_at_pairs, look_at_prompts
from trl_ext.trainers.rows.pairs import refused_by_template, token_columns
from trl_ext.trainers.rows.rendering import render_prompt

NUM_ROWS = 8
# Characters shown of the first row, and of each other row.
FIRST_ROW_CHARS, ROW_CHARS = 2000, 160


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of each split as the recipe maps them.

    Args:
        train, held_out: The first eight at most; held_out is None if the run does not evaluate.
        read: All rows that were read of both splits; `is_whole` is True if that is the whole dataset.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]] | None
    read: Splits
    is_whole: bool


def read_rows(parsed: Parsed) -> Rows:
    """Read and map the first rows as a stream, without downloading the rest; small local data completely.

    Raises:
        ConfigError, DataError: The script could not load or map the data, or a row cannot be read.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    source = training.data_source(parsed.script_args, parsed.training_args, parsed.dataset_args)
    is_whole = source.is_small and not source.streaming
    if source.mixture is not None:
        source.mixture.streaming = True
    try:
        parts: Any = (source if is_whole else replace(source, streaming=True)).load()
        if not is_whole:
            parts = [None if part is None else Dataset.from_list(list(part.take(NUM_ROWS))) for part in parts]
    except TrlExtError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"The first rows of {source.name or 'the mixture'} cannot be read: {error}.") from error
    mapping, options = parsed.script_args.mapping(), (parsed.training_args, parsed.model_args)
    train, held_out = (
        training.apply_mapping(mapping, part, role, *options) for part, role in zip(parts, ROLES, strict=True)
    )
    return Rows(_first(train), None if held_out is None else _first(held_out), Splits(train, held_out), is_whole)


def _first(dataset: Any) -> list[dict[str, Any]]:
    return list(dataset.select(range(min(NUM_ROWS, len(dataset)))))


def check_rows(parsed: Parsed, rows: Rows, rewards: Sequence[Any], tokenizer: Any) -> list[Finding]:
    """Check columns, prompts and sides; raise DataError if the trainer would refuse the rows.

    Args:
        parsed: The recipe and its overrides.
        rows: The rows that were read.
        rewards: Rule sets and reward functions of the recipe.
        tokenizer: The model's.
    """
    from trl_ext.trainers.settings.checks import check_steps

    with _warnings() as warned:
        if parsed.trainer == "reward":
            look_at_pairs(rows.read, parsed.training_args, tokenizer)
        else:
            look_at_prompts(rows.read, parsed.model_args.model_name_or_path, parsed.training_args, rewards, tokenizer)
    if rows.is_whole and parsed.training_args.memory is None:  # else the plan may choose other batches
        check_steps(rows.read.train, parsed.training_args)
    held_out = "" if rows.held_out is None else f" and {len(rows.read.held_out)} held-out ones"
    columns = ", ".join(rows.train[0])
    found = [ok("data", f"{len(rows.read.train)} rows{held_out} read, with the columns {columns}.")]
    found += [note("data", sentence) for sentence in warned]
    if parsed.trainer != "reward" and parsed.script_args.prompt_format is None:
        if training.is_unrendered_text(rows.train[0].get("prompt"), tokenizer):
            found.append(note("data", NOT_APPLIED, AS_MEANT))
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect warnings of the trainers' checks in the block, instead of printing them."""
    logger = logging.getLogger("trl_ext.trainers.rows")
    sentences: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield sentences
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def show_rows(parsed: Parsed, rows: Rows, rewards: Sequence[Any], tokenizer: Any) -> list[Finding]:
    """Show the first rows as the model reads them, with the columns that the rules read; the first row is cut less.

    Args:
        parsed: The recipe and its overrides.
        rows: The rows that were read.
        rewards: Rule sets and reward functions of the recipe.
        tokenizer: The model's.
    """
    read = [column for rules in rewards for column in getattr(rules, "columns", ())]
    shown = ("chosen", "rejected", *read) if parsed.trainer == "reward" else tuple(read)
    options = getattr(parsed.training_args, "chat_template_kwargs", None)
    found = []
    for number, row in enumerate(rows.train):
        limit = FIRST_ROW_CHARS if number == 0 else ROW_CHARS
        parts = [_cut(render_prompt(row["prompt"], tokenizer, options), limit)] if "prompt" in row else []
        parts += [f"{name}: {_cut(str(row[name]), limit)}" for name in dict.fromkeys(shown) if name in row]
        found.append(ok(f"row {number}", "  |  ".join(parts)))
    return found


def _cut(text: str, limit: int) -> str:
    """Return a text in one line, without its middle if it is long."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} [...] {text[-limit // 3 :]}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest prompt, of the longest prompt with an answer (`side`, for pairs), and numbers of rows.

    `num_long` counts the pairs with a side beyond max_length, `num_rows` all measured rows.
    """

    prompt: int = 0
    side: int = 0
    num_long: int = 0
    num_rows: int = 0


def measure(parsed: Parsed, rows: Rows, tokenizer: Any) -> Lengths:
    """Count the tokens of the rows; zeros without a tokenizer or a template that messages need.

    Raises DataError if the chat template refuses the messages.
    """
    are_chats = any(isinstance(row.get(name), list) for row in rows.train for name in ("prompt", "chosen"))
    if tokenizer is None or not rows.train or (are_chats and not tokenizer.chat_template):
        return Lengths()
    is_pairs = parsed.trainer == "reward"
    with refused_by_template(rows.train, ROLES[0], tokenizer):
        found = [_row_tokens(row, tokenizer, is_pair=is_pairs) for row in rows.train]
    tokens = [num for num in found if num is not None]
    if not is_pairs:
        return Lengths(prompt=max(tokens, default=0), num_rows=len(tokens))
    limit = parsed.training_args.max_length
    num_long = sum(length > limit for length in tokens) if limit else 0
    return Lengths(side=max(tokens), num_long=num_long, num_rows=len(tokens))


def _row_tokens(row: dict[str, Any], tokenizer: Any, *, is_pair: bool) -> int | None:
    """Count the tokens of a row's prompt, or of a pair's longer side with its prompt; None if it has neither."""
    if columns := token_columns(row):
        return max(len(row[name]) for name in columns)
    if "prompt" not in row and "input_ids" in row:
        return len(row["input_ids"])
    if is_pair:
        start = row.get("prompt") or type(row["chosen"])()
        return max(_num_tokens(tokenizer, start + row[side], False) for side in ("chosen", "rejected"))
    return _num_tokens(tokenizer, row["prompt"], True) if "prompt" in row else None


def _num_tokens(tokenizer: Any, text: Any, opens_answer: bool) -> int:
    """Return the tokens of a text, or of messages through the chat template, with the answer's opening if asked."""
    if isinstance(text, list):
        text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=opens_answer)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_lengths(parsed: Parsed, lengths: Lengths | None) -> list[Finding]:
    """Compare rows with the recipe's lengths; raise ConfigError if a micro-batch cannot hold the longest row."""
    if lengths is None or not lengths.num_rows:
        return []
    if parsed.trainer == "reward":
        what = f"The longest of {2 * lengths.num_rows} sides has {lengths.side} tokens; max_length is "
        what += f"{parsed.training_args.max_length}."
        if not lengths.num_long:
            return [ok("lengths", what)]
        advice = f"{lengths.num_long} of {lengths.num_rows} pairs are dropped: raise max_length to keep them."
        return [(problem if lengths.num_long == lengths.num_rows else note)("lengths", what, advice)]
    from trl_ext.trainers.settings.checks import check_budget

    completion, limit = parsed.training_args.max_completion_length, parsed.training_args.max_tokens_per_forward
    if limit:
        check_budget(lengths.prompt, completion, limit)
    what = f"The longest of {lengths.num_rows} prompts has {lengths.prompt} tokens"
    return [ok("lengths", f"{what}; with its completion {lengths.prompt + completion} at most.")]

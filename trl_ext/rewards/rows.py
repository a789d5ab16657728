"""Make rows from a batch in TRL's shape: completions as text, columns cut into one mapping per row."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any

from trl_ext.errors import DataError
from trl_ext.rewards.rule import Row

# Arguments that TRL passes to reward functions besides the dataset's columns.
TRL_EXTRAS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


def completion_text(completion: Any) -> str:
    """The text of a completion in any of TRL's shapes.

    A string is itself; None is empty; a message list gives the content of its last assistant message, so that tool
    calls and tool results before it do not count. Text parts of a content list are joined.

    Example:
        >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "A: 18"}]}])
        'A: 18'
    """
    if isinstance(completion, str):
        return completion
    if completion is None:
        return ""
    if isinstance(completion, list | tuple) and all(isinstance(message, Mapping) for message in completion):
        contents = (message.get("content") for message in reversed(completion) if message.get("role") == "assistant")
        return content_text(next(contents, None))
    raise DataError(
        f"A completion is a {type(completion).__name__}. Give text or a list of messages with 'role' and 'content'."
    )


def content_text(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or None where the message only calls a tool."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    raise DataError(f"A message's content is a {type(content).__name__}. Give a string or a list of parts.")


def dataset_columns(extras: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """The keyword arguments that are columns of the dataset: lists, without TRL's own arguments.

    Anything else is ignored, so that an argument that a later TRL adds does not stop a run.
    """
    return {
        name: values for name, values in extras.items() if name not in TRL_EXTRAS and isinstance(values, list | tuple)
    }


def make_rows(prompts: Any, completions: Any, completion_ids: Any, columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """One Row per completion; DataError names the column whose length differs."""
    if completions is None:
        raise DataError("There are no completions to score. Pass completions=[...], one per row.")
    num_rows = len(completions)
    for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
        if values is not None and len(values) != num_rows:
            raise DataError(
                f"Column '{name}' has {len(values)} rows for {num_rows} completions. Give one value per completion."
            )
    prompts = prompts if prompts is not None else [None] * num_rows
    ids = map(token_ids, completion_ids) if completion_ids is not None else [None] * num_rows
    rows = zip(prompts, completions, ids, column_rows(columns, num_rows), strict=True)
    return [Row(prompt, completion_text(completion), tokens, cells) for prompt, completion, tokens, cells in rows]


def column_rows(columns: Mapping[str, Sequence[Any]], num_rows: int) -> Iterator[dict[str, Any]]:
    """The cells of each row, by column."""
    if not columns:
        return ({} for _ in range(num_rows))
    return (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))


def is_null(cell: Any) -> bool:
    """True for None and for NaN, which stands for a missing value in columns of numbers."""
    return cell is None or (isinstance(cell, float) and isnan(cell))


def token_ids(ids: Any) -> tuple[int, ...] | None:
    """Token ids as plain integers: tensors and arrays hash by identity, which would hide repetition."""
    return None if ids is None else tuple(ids.tolist() if hasattr(ids, "tolist") else ids)

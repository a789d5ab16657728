"""Make rows from a batch in TRL's shape: completions as text and as turns, columns as one mapping per row.

A group is a run of rows with equal prompts, which TRL's sampler puts next to each other. If the batches of several
processes cut a group, a row's group is the part in its batch. Two equal prompts next to each other are one group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

from trl_ext.errors import DataError
from trl_ext.rewards.base.rule import UNREAD, Row

# Other names of `reasoning_content` in chat templates and servers.
_REASONING = ("thinking", "reasoning")
# Arguments that TRL passes to reward functions in addition to the dataset's columns.
TRL_EXTRAS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


def as_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the cells of rows by column; None where a row lacks it."""
    columns = {}
    for name in names:
        columns[name] = [row.get(name) for row in rows]
    return columns


def completion_text(completion: Any) -> str:
    """Return the text of a completion in any of TRL's shapes.

    Args:
        completion: Text; None, which is empty; or a list of messages, of which the last assistant message counts:
            earlier tool calls and tool results do not. Text parts of a content list are joined.

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
    raise DataError(f"A completion is a {type(completion).__name__}. Give text or a list of messages with roles.")


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, a list of parts, or None if the message only calls a tool."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list | tuple) and all(isinstance(part, str | Mapping) for part in content):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    raise DataError(f"A message's content is {content!r:.60}. Give a string or a list of parts.")


def dataset_columns(extras: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the keyword arguments that are columns of the dataset: lists and arrays, without TRL's arguments."""
    columns: dict[str, Sequence[Any]] = {}  # Others are ignored, so that a later TRL's new argument stops no run.
    for name, values in extras.items():
        if name in TRL_EXTRAS:
            continue
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):  # a list, or a column of datasets
            columns[name] = values
        elif getattr(values, "shape", None):  # An array, a tensor or a pandas column.
            columns[name] = values.tolist()
    return columns


def make_rows(
    prompts: Any,
    completions: Any,
    completion_ids: Any,
    columns: Mapping[str, Sequence[Any]],
    step: int | None = None,
    end: str = "",
    *,
    grouped: bool,
) -> list[Row]:
    """Return one Row per completion of a batch as TRL passes it; a DataError names a column of another length.

    Args:
        prompts, completions, completion_ids: As TRL passes them to a reward function; None for prompts or token ids
            that are not known.
        columns: Dataset columns by name, a cell per completion.
        step: The training step, None outside of training.
        end: How the chat template ends a prompt of messages.
        grouped: Whether a rule reads the group of a row, which doubles the time.
    """
    if completions is None:
        raise DataError("There are no completions to score. Pass completions=[...], one per row.")
    num_rows = len(completions)
    for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
        if values is not None and len(values) != num_rows:
            raise DataError(f"Column '{name}' has {len(values)} rows for {num_rows} completions. Give one for each.")
    prompts = prompts if prompts is not None else [None] * num_rows
    ids = map(token_ids, completion_ids) if completion_ids is not None else [None] * num_rows
    cells = zip(*columns.values(), strict=True) if columns else [()] * num_rows
    group = () if grouped else UNREAD
    rows = [
        Row(prompt, completion_text(done), tokens, dict(zip(columns, own, strict=True)), turns(done), group, step, end)
        for prompt, done, tokens, own in zip(prompts, completions, ids, cells, strict=True)
    ]
    return with_groups(rows) if grouped else rows


def with_groups(rows: list[Row]) -> list[Row]:
    """Return the rows, each with the neighbours of the same prompt as its group; empty without a prompt."""
    grouped: list[Row] = []
    start = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows) and _same_prompt(rows[start].prompt, rows[end].prompt):
            continue
        run = tuple(rows[start:end])
        if len(run) > 1:
            grouped += [replace(row, group=run[:place] + run[place + 1 :]) for place, row in enumerate(run)]
        else:
            grouped += run
        start = end
    return grouped


def _same_prompt(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # Arrays within a prompt have no single truth value.
        return False


def turns(completion: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the turns of a completion in any of TRL's shapes; an assistant's reasoning is separate from its content.

    Example:
        >>> turns("<think>9 * 2</think>A: 18")
        ({'role': 'assistant', 'content': 'A: 18', 'reasoning_content': '9 * 2'},)
    """
    if isinstance(completion, str):
        return (_assistant(completion),)
    found = []
    for message in completion or ():
        name = next((name for name in _REASONING if name in message), None)
        content = message.get("content")
        if name is not None:
            rest = {key: part for key, part in message.items() if key != name}
            message = {**rest, "reasoning_content": message[name]}
        elif message.get("role") == "assistant" and isinstance(content, str):
            message = {**message, **_assistant(content)}
        found.append(message)
    return tuple(found)


def _assistant(content: str) -> dict[str, Any]:
    end = content.rfind("</think>")
    if end >= 0:
        # A chat template may open the thoughts in the prompt, so that the completion only closes them.
        thoughts, answer = content[:end].lstrip().removeprefix("<think>"), content[end + len("</think>") :]
    elif content.rfind("<think>") >= 0:  # From the end: several times as fast as `in` on prose.
        answer, _, thoughts = content.partition("<think>")
    else:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": answer, "reasoning_content": thoughts.strip()}


def is_null(cell: Any) -> bool:
    """Return True for None and for NaN, a missing value in columns of numbers."""
    return cell is None or (isinstance(cell, float) and isnan(cell))


def token_ids(ids: Any) -> tuple[int, ...] | None:
    """Return token ids as plain integers: tensors and arrays hash by identity, which would hide repetition."""
    return None if ids is None else tuple(ids.tolist() if hasattr(ids, "tolist") else ids)

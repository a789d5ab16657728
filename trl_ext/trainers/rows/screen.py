"""Finds in Arrow's columns the rows that are worth a look, so that a million rows take seconds.

A screen may flag a row that is fine, never the other way round: what is wrong with it is for `TextCheck` to say.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from trl_ext.trainers.rows.text import INSTEAD_OF_CONTENT, TextCheck

_ROWS_AT_ONCE = 20_000


def suspects(dataset: Dataset, column: str, check: TextCheck) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the rows of a column that `check` must look at."""
    plain = dataset.select_columns([column]).with_format(None)
    for start, values in batches(dataset, column):
        found = (np.flatnonzero(flagged(values, check)) + start).tolist()
        for part in (found[i : i + 1000] for i in range(0, len(found), 1000)):
            yield from zip(part, _values(plain, part, column), strict=True)


def _values(plain: Dataset, rows: list[int], column: str) -> list[Any]:
    """Return the values of these rows; half a character for one that holds bytes which are no UTF-8."""
    try:
        return list(plain[rows][column])
    except UnicodeDecodeError:
        return ["\udcff"] if len(rows) == 1 else [value for row in rows for value in _values(plain, [row], column)]


def batches(dataset: Dataset, column: str) -> Iterator[tuple[int, pa.Array]]:
    """Yield the number of the first row and the values of a column, some thousand rows at a time."""
    start = 0
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        yield start, table[column].combine_chunks()
        start += len(table)


def flagged(column: pa.Array, check: TextCheck) -> np.ndarray:
    """Return True for each row that is not known to be fine. All rows of a type that is none of TRL's."""
    found = np.ones(len(column), dtype=bool)
    given = np.flatnonzero(_numpy(column.is_valid()))
    column = column.drop_null()
    if _is_text(column.type):
        found[given] = _unreadable(column) | (_says_nothing(column, check) & (not check.may_be_blank))
    elif _are_messages(column.type) and len(column):
        found[given] = _flagged_messages(column, check)
    return found


def _flagged_messages(column: pa.Array, check: TextCheck) -> np.ndarray:
    """Flags of lists of messages, none of which is null."""
    messages, num_messages, row = _unfolded(column)
    role, content = (pc.struct_field(messages, name) for name in ("role", "content"))
    stands_in = np.zeros(len(messages), dtype=bool)
    for name in INSTEAD_OF_CONTENT:
        if messages.type.get_field_index(name) >= 0:
            stands_in |= _is_filled(pc.struct_field(messages, name))
    is_given = _numpy(content.is_valid())
    if _is_text(content.type):
        text = pc.fill_null(content, "")
        is_bad, says_nothing = _unreadable(text), _says_nothing(text, check)
    else:
        is_bad, says_nothing = np.zeros(len(messages), dtype=bool), ~_is_filled(content)
    is_bad |= ~(is_given | stands_in) | ~_is_filled(pc.utf8_trim_whitespace(role))
    speaks = np.bincount(row, weights=stands_in | ~says_nothing, minlength=len(column)) > 0
    found: np.ndarray = num_messages == 0
    found |= np.bincount(row, weights=is_bad, minlength=len(column)) > 0
    return found if check.may_be_blank else found | ~speaks


def num_bytes(column: pa.Array, per_chat: int, per_message: int) -> np.ndarray:
    """Return the bytes of each text, or of each list of messages with an allowance for it and for each message.

    Parts of content other than text count as nothing; so do values of a type that is none of TRL's.
    """
    if _is_text(column.type):
        return _numpy(pc.binary_length(column))
    if not _are_messages(column.type):
        return np.zeros(len(column), dtype=int)
    messages, num_messages, row = _unfolded(column)
    content = pc.struct_field(messages, "content")
    sizes = _numpy(pc.fill_null(pc.binary_length(content), 0)) if _is_text(content.type) else None
    return np.bincount(row, weights=sizes, minlength=len(column)).astype(int) + per_chat + per_message * num_messages


def role_sequences(column: pa.Array) -> dict[str, int]:
    """Return each sequence of roles in lists of messages, such as "user, assistant", with the first place of it."""
    if not _are_messages(column.type):
        return {}
    messages, num_messages, _ = _unfolded(column)
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_messages)]), pa.int32())
    roles = pa.ListArray.from_arrays(offsets, pc.struct_field(messages, "role").cast(pa.string()))
    sequences = pc.binary_join(roles, ", ")
    return {sequence.as_py(): pc.index(sequences, sequence).as_py() for sequence in pc.unique(sequences)}


def _unfolded(column: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Return the messages of all rows in a line, how many each row has, and the place of each one's row."""
    num_messages = _numpy(pc.list_value_length(column))
    return column.flatten(), num_messages, np.repeat(np.arange(len(column)), num_messages)


def _unreadable(texts: pa.Array) -> np.ndarray:
    """Return True for texts with a NUL, and for all of an array that holds text which is no UTF-8."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return np.ones(len(texts), dtype=bool)
    return _numpy(pc.match_substring(texts, "\0"))


def _says_nothing(texts: pa.Array, check: TextCheck) -> np.ndarray:
    return _numpy(pc.match_substring_regex(texts, check.nothing_said()))


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _are_messages(kind: pa.DataType) -> bool:
    """Return True for lists of messages with role and content, where content is text or a list of parts."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    if "role" not in fields or "content" not in fields or not _is_text(fields["role"]):
        return False
    content = fields["content"]
    return _is_text(content) or pa.types.is_list(content) or pa.types.is_large_list(content)


def _is_filled(values: pa.Array) -> np.ndarray:
    """Return True where a list or a text is neither null nor empty; for other types where it is not null."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _numpy(pc.fill_null(pc.list_value_length(values), 0)) > 0
    if _is_text(values.type):
        return _numpy(pc.fill_null(pc.binary_length(values), 0)) > 0
    return _numpy(values.is_valid())


def _numpy(array: Any) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values

"""Rows and columns of datasets, read from Arrow many at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from trl_ext.trainers.rows.sentence import refuse

_ROWS_AT_ONCE = 20_000


def rows_where(
    dataset: Dataset, columns: list[str], flags: Callable[[dict[str, pa.Array]], np.ndarray] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and cells of the rows for which `flags`, called on many rows at a time, returns True; of all rows
    without `flags`."""
    plain = dataset.select_columns(columns).with_format(None)
    start = 0
    for table in plain.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        is_found = np.ones(len(table)) if flags is None else flags({n: table[n].combine_chunks() for n in columns})
        found = (np.flatnonzero(is_found) + start).tolist()
        start += len(table)
        for part in (found[i : i + 1000] for i in range(0, len(found), 1000)):
            cells = [_values(plain.select_columns([name]), part, name) for name in columns]
            for row, values in zip(part, zip(*cells, strict=True), strict=True):
                yield row, dict(zip(columns, values, strict=True))


def _values(plain: Dataset, rows: list[int], column: str) -> list[Any]:
    """Return the values of rows; half a surrogate pair for a row with invalid UTF-8."""
    try:
        return list(plain[rows][column])
    except UnicodeDecodeError:
        return ["\udcff"] if len(rows) == 1 else [value for row in rows for value in _values(plain, [row], column)]


def batches(dataset: Dataset, column: str) -> Iterator[tuple[int, pa.Array]]:
    """Yield a column in slices, each with the number of its first row."""
    start = 0
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        yield start, table[column].combine_chunks()
        start += len(table)


def check_utf8(dataset: Dataset, role: str, columns: Iterable[str]) -> None:
    """Raise DataError for a text in the columns that is not UTF-8. A JSON file in Latin-1 loads without error."""
    for column in columns:
        for start, cells in batches(dataset, column):
            if not _is_utf8(cells):
                row = next(row for row in range(len(cells)) if not _is_utf8(cells.slice(row, 1)))
                advice = "Convert the file: iconv -f LATIN1 -t UTF-8 OLD > NEW."
                refuse({f"bytes that are no UTF-8 in the column '{column}'": [start + row]}, role, advice)


def _is_utf8(cells: pa.Array) -> bool:
    try:
        cells.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def have_no_tokens(column: pa.Array) -> np.ndarray:
    """Return True for each row without token ids; for all rows if the type is not a list of integers."""
    are_tokens = _is_list(column.type) and pa.types.is_integer(column.type.value_type)
    return are_empty(column) if are_tokens else np.ones(len(column), dtype=bool)


def are_empty(column: pa.Array) -> np.ndarray:
    """Return True for each row that is null, an empty text or an empty list."""
    if _is_list(column.type):
        return _numpy(pc.fill_null(pc.list_value_length(column), 0)) == 0
    if _is_text(column.type):
        return _numpy(pc.fill_null(pc.binary_length(column), 0)) == 0
    return ~_numpy(column.is_valid())


def num_bytes(column: pa.Array, per_chat: int, per_message: int) -> np.ndarray:
    """Return the bytes of each text or list of messages (plus allowances); other content and types count as 0."""
    if _is_text(column.type):
        return _numpy(pc.binary_length(column))
    if not _are_messages(column.type):
        return np.zeros(len(column), dtype=int)
    messages, num_messages = column.flatten(), _numpy(pc.list_value_length(column))
    content = pc.struct_field(messages, "content")
    sizes = _numpy(pc.fill_null(pc.binary_length(content), 0)) if _is_text(content.type) else None
    row = np.repeat(np.arange(len(column)), num_messages)  # of each message
    return np.bincount(row, weights=sizes, minlength=len(column)).astype(int) + per_chat + per_message * num_messages


def role_sequences(column: pa.Array) -> dict[str, int]:
    """Return each sequence of roles in lists of messages, such as "user, assistant", with its first row."""
    if not _are_messages(column.type):
        return {}
    messages, num_messages = column.flatten(), _numpy(pc.list_value_length(column))
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_messages)]), pa.int32())
    roles = pa.ListArray.from_arrays(offsets, pc.struct_field(messages, "role").cast(pa.string()))
    sequences = pc.binary_join(roles, ", ")
    return {sequence.as_py(): pc.index(sequences, sequence).as_py() for sequence in pc.unique(sequences)}


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _are_messages(kind: pa.DataType) -> bool:
    """Return True for lists of messages with role and content, where content is text or a list of parts."""
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    if "role" not in fields or "content" not in fields or not _is_text(fields["role"]):
        return False
    return _is_text(fields["content"]) or _is_list(fields["content"])


def _numpy(array: Any) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values

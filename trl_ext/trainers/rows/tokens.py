"""Token ids: those that a model does not have, and more of them than it reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from trl_ext.trainers.rows.rendering import positions
from trl_ext.trainers.rows.screen import batches, have_no_tokens
from trl_ext.trainers.rows.sentence import parts, refuse

# Where a trainer keeps the numbers that rows had before some were dropped.
_ROW = "row"


def check_tokens(datasets: Any, role: str, columns: Sequence[str], config: Any) -> None:
    """Raise DataError for token ids that the model does not have, and for rows longer than it reads.

    Args:
        datasets: Map-style, or a dict of them; streams and None are not looked at.
        role: What the message calls it.
        columns: Lists of token ids.
        config: The model's.
    """
    limit, vocabulary = positions(config), config.get_text_config().vocab_size
    for name, dataset in parts(datasets, role):
        for column in columns if isinstance(dataset, Dataset) else ():
            check_ids(dataset, name, column, vocabulary)
            if limit is not None and (rows := _longer(dataset, column, limit)):
                advice = f"Set max_length to {limit} or less, or drop such rows."
                refuse({f"more {column} than the {limit} tokens that the model reads": rows}, name, advice)


def check_ids(dataset: Dataset, role: str, column: str, vocabulary: int) -> None:
    """Raise DataError for rows without token ids, and for ids outside the vocabulary."""
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
            values = enumerate(ids.to_pylist(), start)
            foreign += [number for number, row in values if any(token not in known for token in row or ())]
    found = {f"no {column}": missing, f"{column} outside the {vocabulary} tokens of the vocabulary": foreign}
    found = {problem: _as_given(dataset, rows) for problem, rows in found.items() if rows}
    if found:
        refuse(found, role, "Tokenize with the model's own tokenizer, and drop rows that have no tokens.")


def _longer(dataset: Dataset, column: str, limit: int) -> list[int]:
    lengths = [pc.list_value_length(ids).to_numpy(zero_copy_only=False) for _, ids in batches(dataset, column)]
    return _as_given(dataset, np.flatnonzero(np.concatenate(lengths) > limit).tolist())


def _as_given(dataset: Dataset, rows: list[int]) -> list[int]:
    """Return the rows' numbers in the dataset that the user gave."""
    return list(dataset[rows][_ROW]) if rows and _ROW in dataset.column_names else rows

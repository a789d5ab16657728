"""Columns of datasets, and errors for arguments that are none."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, IterableDataset

from trl_ext.errors import DataError
from trl_ext.trainers.rows.sentence import listed


def columns_of_all(dataset: Any, role: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield (name for messages, dataset, columns) for a dataset, or for each dataset of a dict."""
    if isinstance(dataset, dict):
        if role == "train_dataset":
            raise DataError(f"train_dataset holds the splits {listed(dataset)}. Give one: train_dataset[...].")
        for name, part in dataset.items():
            yield from columns_of_all(part, f"{role}['{name}']")
    elif isinstance(dataset, (Dataset, IterableDataset)):
        yield role, dataset, columns_of(dataset, role)
    elif isinstance(dataset, (list, tuple)) or hasattr(dataset, "iloc"):  # a DataFrame has iloc
        maker = "from_pandas" if hasattr(dataset, "iloc") else "from_list"
        raise DataError(f"{role} is a {type(dataset).__name__}. Make a dataset of it: datasets.Dataset.{maker}(...).")
    # Else it is None, or TRL refuses it.


def columns_of(dataset: Dataset | IterableDataset, role: str) -> list[str]:
    """Return the column names; raise DataError if there is no row."""
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise DataError(f"{role} is empty. Check the split's name and the filters that made it.")
        return dataset.column_names
    if dataset.column_names is not None:
        return dataset.column_names
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"{role} is empty: the stream ended before its first row.")
    return list(first)

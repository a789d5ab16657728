"""Columns of datasets, and error messages that name bad rows and their problems."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset

from trl_ext.errors import DataError

_ROWS_NAMED = 3


def refuse(found: Mapping[str, Sequence[int]], role: str, advice: str) -> NoReturn:
    """Raise a DataError that names the rows of each problem (in words that follow "row 7 has") and gives `advice`."""
    parts = [f"{named_with_verb(rows)} {problem}" for problem, rows in found.items()]
    raise DataError(f"{role}: {'; '.join(parts)}. {advice}")


def named(rows: Sequence[int]) -> str:
    """Return "row 7", or "rows 1, 2, 3 and 4 more"."""
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:_ROWS_NAMED]))}{more}"


def named_with_verb(rows: Sequence[int]) -> str:
    """Return "row 7 has", or "rows 1, 2, 3 and 4 more have"."""
    return f"{named(rows)} {'has' if len(rows) == 1 else 'have'}"


def listed(names: Iterable[str]) -> str:
    """Return the names in quotes, with commas."""
    return ", ".join(f"'{name}'" for name in names)


def parts(datasets: Any, role: str) -> Iterator[tuple[str, Dataset | IterableDataset]]:
    """Yield (name for messages, dataset) for a dataset, or for each dataset of a dict; nothing for None."""
    if isinstance(datasets, dict):
        for name, part in datasets.items():
            yield from parts(part, f"{role}['{name}']")
    elif isinstance(datasets, Dataset | IterableDataset):
        yield role, datasets


def columns_of_all(dataset: Any, role: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield (name for messages, dataset, columns) for a dataset, or for each dataset of a dict."""
    if isinstance(dataset, dict) and role == "train_dataset":
        raise DataError(f"train_dataset holds the splits {listed(dataset)}. Give a split: train_dataset[...].")
    if isinstance(dataset, (list, tuple)) or hasattr(dataset, "iloc"):  # a DataFrame has iloc
        maker = "from_pandas" if hasattr(dataset, "iloc") else "from_list"
        raise DataError(f"{role} is a {type(dataset).__name__}. Make a dataset of it: datasets.Dataset.{maker}(...).")
    for name, part in dataset.items() if isinstance(dataset, dict) else ():
        yield from columns_of_all(part, f"{role}['{name}']")
    if isinstance(dataset, Dataset | IterableDataset):  # else it is None, or TRL refuses it
        yield role, dataset, columns_of(dataset, role)


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

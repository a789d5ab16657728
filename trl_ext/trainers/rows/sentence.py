"""Error messages that name bad rows and their problems."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset

from trl_ext.errors import DataError

_ROWS_NAMED = 3


def refuse(found: Mapping[str, Sequence[int]], role: str, advice: str) -> NoReturn:
    """Raise a DataError that names the rows of each problem (in words that follow "row 7 has") and gives `advice`."""
    parts = [f"{named(rows)} {'has' if len(rows) == 1 else 'have'} {problem}" for problem, rows in found.items()]
    raise DataError(f"{role}: {'; '.join(parts)}. {advice}")


def named(rows: Sequence[int]) -> str:
    """Return "row 7", or "rows 1, 2, 3 and 4 more"."""
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:_ROWS_NAMED]))}{more}"


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

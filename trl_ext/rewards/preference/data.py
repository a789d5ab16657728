"""Helpers of the tools for pairs: checked datasets, rows in chunks, scores in TRL's call.

Functions import `datasets` inside, so that rules do not need it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError, RuleError

if TYPE_CHECKING:
    from datasets import Dataset

# A RuleSet, one column of `RuleSet.split()`, or any other callable that returns one total per completion.
Scorer = Callable[..., list[float | None]]

CHUNK_ROWS = 256  # in memory as Python objects at one time, and one step of the progress bar
_BAR_DELAY_S = 2.0

# Keyword arguments of TRL's call, and columns that would show a rule the answer. TRL, too, withholds the first three.
_NOT_FOR_RULES = frozenset(
    {"prompt", "completion", "completion_ids", "prompts", "completions", "chosen", "rejected", "log_metric"}
)

# Totals are sums of weighted values: 0.7 - 0.2 is slightly below 0.5, and equal verdicts may differ in the last bit.
_ROUNDING = 1e-9


def checked_dataset(dataset: Any, accepted: Sequence[tuple[str, ...]]) -> "Dataset":
    """Return the dataset with plain Python values; DataError without rows or without an accepted set of columns."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise DataError(f"The dataset is a {type(dataset).__name__}. Give a datasets.Dataset: one split, no stream.")
    if not any(set(columns) <= set(dataset.column_names) for columns in accepted):
        wanted = " or ".join(f"({', '.join(columns)})" for columns in accepted)
        there = ", ".join(dataset.column_names) or "none"
        raise DataError(f"The dataset needs the columns {wanted}; its columns are: {there}. Rename its columns.")
    if len(dataset) == 0:
        raise DataError("The dataset has no rows. Give at least one row.")
    return dataset.with_format(None)


def check_number_from(key: str, value: Any, least: float) -> None:
    """Raise ConfigError unless `value` is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < least:
        raise ConfigError(f"{key} is {value!r}. Give a finite number of at least {least:g}.")


def falls_short(gap: float, min_gap: float) -> bool:
    """Return True if a difference of scores is below `min_gap` by more than rounding."""
    return gap < min_gap - _ROUNDING


def counts(report: Any) -> str:
    """Return a dataclass of counts as text, one field a line."""
    return "\n".join(f"{field.name:24} {getattr(report, field.name)}" for field in fields(report))


def chunks(items: Sequence[Any], task: str, unit: str) -> Iterator[Sequence[Any]]:
    """Yield slices of `items`, with a progress bar that appears only if the work takes long."""
    from datasets.utils.tqdm import tqdm

    with tqdm(total=len(items), desc=task, unit=unit, delay=_BAR_DELAY_S) as bar:
        for start in range(0, len(items), CHUNK_ROWS):
            chunk = items[start : start + CHUNK_ROWS]
            yield chunk
            bar.update(len(chunk))


def rule_columns(batch: Mapping[str, list[Any]], positions: Iterable[int]) -> dict[str, list[Any]]:
    """Return the columns that rules may read, with the values at these positions of the batch (repeats allowed)."""
    positions = list(positions)
    read = (name for name in batch if name not in _NOT_FOR_RULES)
    return {name: [batch[name][position] for position in positions] for name in read}


def scores(
    rules: Scorer, prompts: list[Any], completions: list[Any], columns: dict[str, list[Any]], rows: Sequence[int]
) -> list[float | None]:
    """Return the rules' total of each completion; an error names the rows of the dataset where it arose."""
    if not callable(rules):
        raise ConfigError(f"rules is {rules!r}. Give a RuleSet, such as RuleSet([Answer()]).")
    try:
        return list(rules(prompts=prompts, completions=completions, **columns))
    except RuleError as error:
        raise RuleError(
            f"While scoring rows {min(rows)} to {max(rows)} of the dataset (the samples counted from there): {error}"
        ) from error

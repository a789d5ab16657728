"""Preference pairs filtered once for all processes.

A rule with a time limit may judge a row on one process and not on another, which is slower at that moment. Processes
with different rows would wait for each other for ever, so the first one filters and tells the others.
"""

from dataclasses import dataclass
from typing import Any

from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.rewards import filter_pairs
from trl_ext.rewards.preference.filter import with_gaps

_ROW = "row_before_filter"  # the column that tells which rows are left


@dataclass(frozen=True, slots=True)
class Filtered:
    """What a filter did to a dataset, small enough to travel between processes.

    Args:
        rows: Numbers of the rows that are left.
        gaps: The rules' gap of each of them, None without rules.
        report: The filter's table.
    """

    rows: list[int]
    gaps: list[float | None] | None
    report: str


def filter_everywhere(dataset: Any, rules: Any, margin: bool, role: str) -> Any:
    """`rewards.filter_pairs` with the same outcome on every process, its report printed on the first one.

    Args:
        dataset: Training or held-out pairs; None stays None.
        rules: A RuleSet or None.
        margin: Add the column `margin`.
        role: What the dataset is called in the report and in errors.

    Raises:
        DataError: Columns are missing, or no row is left; on every process.
        ConfigError: The dataset is a stream.
    """
    if dataset is None:
        return None
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    is_first = PartialState().is_main_process
    (outcome,) = broadcast_object_list([_outcome(dataset, rules, margin, role) if is_first else None])
    if isinstance(outcome, TrlExtError):
        raise outcome
    if is_first:
        print(f"\n{role.capitalize()}:\n{outcome.report}\n", flush=True)
    pairs = dataset.select(outcome.rows)
    return pairs if outcome.gaps is None else with_gaps(pairs, outcome.gaps, margin)


def _outcome(dataset: Any, rules: Any, margin: bool, role: str) -> Filtered | TrlExtError:
    """The error is a value here: raised, it would leave the other processes waiting."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return ConfigError(f"filter_pairs reads the {role} whole, and they are a stream. Set one of the two to false.")
    try:
        numbered = dataset.add_column(_ROW, list(range(len(dataset))))
        pairs, report = filter_pairs(numbered, rules, margin=margin)
    except DataError as error:
        return DataError(f"The {role} cannot be filtered. {error}")
    except TrlExtError as error:
        return error
    return Filtered(pairs[_ROW][:], None if rules is None else pairs["rule_gap"][:], str(report))

"""Find rules that scored nothing in a batch, with the reason.

A rule without a value for a row is left out of the row's total. If it has no value for any row, only the other rules
are optimised, such as length instead of right answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.rewards.base.rows import is_null
from trl_ext.rewards.base.rule import Rule
from trl_ext.rewards.totals.scorer import Column


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one rule's rows with and without a value; it adds up over batches and ranks."""

    num_rows: int = 0  # without the rows that the rule's `when` excludes
    num_scored: int = 0  # rows with a value
    num_null: int = 0  # rows without a value in which a column that the rule reads is null or NaN
    num_covered: int = 0  # rows without a value that another rule judged right or wrong
    reason: str = ""  # status and detail of the first row without a value

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.num_rows + other.num_rows,
            self.num_scored + other.num_scored,
            self.num_null + other.num_null,
            self.num_covered + other.num_covered,
            self.reason or other.reason,
        )

    @property
    def num_unscored(self) -> int:
        return self.num_rows - self.num_scored

    @property
    def scored_nothing(self) -> bool:
        return self.num_rows > 0 == self.num_scored

    def why(self, rule: Rule) -> str:
        if 0 < self.num_null == self.num_unscored:
            return f"{' or '.join(repr(name) for name in rule.columns)} is null or NaN in all of these rows"
        return f"the reason of the first such row: {self.reason}"


def tally(position: int, rules: Sequence[Rule], found: Sequence[Column], columns: Mapping[str, Any]) -> Tally:
    """Count the rows of a batch for the rule at `position` in the set, by the verdicts of all rules."""
    rule, verdicts = rules[position], found[position].verdicts
    is_for = [index for index, verdict in enumerate(verdicts) if verdict.status != "skipped"]
    unscored = [index for index in is_for if verdicts[index].value is None]
    others = [column for other, column in zip(rules, found, strict=True) if other.judges_correctness]
    first = verdicts[unscored[0]] if unscored else None
    return Tally(
        num_rows=len(is_for),
        num_scored=len(is_for) - len(unscored),
        num_null=sum(any(is_null(columns[name][index]) for name in rule.columns) for index in unscored),
        num_covered=sum(any(other.verdicts[index].value is not None for other in others) for index in unscored),
        reason="" if first is None else f"{first.status}: {first.detail or 'no value'}",
    )

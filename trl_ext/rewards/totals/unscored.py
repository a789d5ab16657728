"""Find rules that scored nothing in a batch, with the reason.

A rule without a value for a row is left out of the row's total. If it has no value for any row, only the other rules
are optimised, such as length instead of right answers. `UndecidedRows` warns if a rule cannot compare many golds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_ext.rewards.base.rows import is_null
from trl_ext.rewards.base.rule import Rule, Verdict
from trl_ext.rewards.totals.scorer import Column

MOST_UNDECIDED_FRAC = 0.01
_LEAST_ROWS = 100  # A first batch of a few rows does not represent the data.

logger = logging.getLogger("trl_ext.rewards")


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


@dataclass(slots=True)
class UndecidedRows:
    """Counts of `undecided` verdicts by rule, with one warning per rule if they are more than 1 % of its rows."""

    num_rows: dict[str, int] = field(default_factory=dict)
    num_undecided: dict[str, int] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def add(self, name: str, verdicts: Sequence[Verdict]) -> None:
        undecided = [verdict for verdict in verdicts if verdict.status == "undecided"]
        rows = self.num_rows.get(name, 0) + sum(verdict.status != "skipped" for verdict in verdicts)
        count = self.num_undecided.get(name, 0) + len(undecided)
        self.num_rows[name], self.num_undecided[name] = rows, count
        if not undecided or name in self._warned or rows < _LEAST_ROWS or count <= MOST_UNDECIDED_FRAC * rows:
            return
        self._warned.add(name)
        logger.warning(
            f"Rule '{name}' left {count} of {rows} completions undecided ({count / rows:.1%}), because it cannot "
            f"compare their gold answers; the last of them: {undecided[-1].detail[:200]}. They have no value from "
            f"this rule. `trl-ext score audit` names all such golds; rules/{name}/undecided_frac is their share."
        )

"""Rows whose gold a rule cannot compare: counted over a run, and said once where they are many."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from trl_ext.rewards.rule import Verdict

MOST_UNDECIDED_FRAC = 0.01
_LEAST_ROWS = 100  # A first batch of a few rows says nothing about the data.

logger = logging.getLogger("trl_ext.rewards")


@dataclass(slots=True)
class UndecidedRows:
    """Counts `undecided` verdicts by rule, and warns once for each rule with more of them than 1 % of its rows.

    Args:
        num_rows: Rows that a rule was for, so far, by the rule's name.
        num_undecided: Those of them that it left undecided.
    """

    num_rows: dict[str, int] = field(default_factory=dict)
    num_undecided: dict[str, int] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def add(self, name: str, verdicts: Sequence[Verdict]) -> None:
        """Count one rule's verdicts over a batch."""
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

"""The report of an audit, as counts and as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trl_ext.rewards.totals.explanation import shortened

# Kinds of failure, in the order of the table, each with the row's failure.
FAULTS = {
    "unreadable": "its gold cannot be read",
    "blank": "a completion that does nothing earns {value}",
    "wrong": "its gold earns {value} against itself",
    "own_text": "only its own text is right: {completion} earns {value}",
    "accepted": "the gold of row {other} earns {value} too",
    "alike": "the gold of row {other} earns {value} too, and the other way round",
}
# Golds of equal meaning in other words are rare; a rule that cannot distinguish golds finds more than this share.
_MAX_ALIKE_FRAC = 0.01

_SHOWN = 3  # failures of a kind in the table
_HEADINGS = ("rule", "rows", "right", "unreadable", "own text", "not asked", "other golds", "accepted", "alike")


@dataclass(frozen=True, slots=True)
class Failure:
    """A wrong verdict.

    Args:
        kind: One of FAULTS.
        row: Number of the judged row, from 0.
        other: Number of the row whose gold was the completion; None if it was the same row.
    """

    kind: str
    row: int
    other: int | None
    completion: str
    value: float | None
    status: str
    detail: str

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:g}"
        what = FAULTS[self.kind].format(value=value, other=self.other, completion=shortened(self.completion, 60))
        return f"row {self.row}: {what} ({self.status}: {shortened(self.detail)})"


@dataclass(frozen=True, slots=True)
class RuleAudit:
    """The counts of one rule over the data.

    Args:
        num_rows: Rows to which it applies (`when`).
        num_right: Rows whose gold earned the ceiling on its row.
        num_unreadable: Rows whose gold it cannot read (`gold_invalid`): lost for training.
        num_own_text: Rows whose gold can be compared only with an equal text, so that other answers are undecided:
            lost for training.
        num_blank: Rows on which a completion that does nothing earned the ceiling, such as tests that test nothing.
        num_not_asked: Rows for which it cannot name a right completion (`Rule.ideal`).
        num_compared: Golds of other rows that were judged.
        num_accepted: Compared golds that earned the ceiling, but not in the other direction.
        num_alike: Compared golds that earned the ceiling in both directions: the rule takes them for the same.
        lost_rows: Numbers of all rows whose gold is unreadable or undecided, to leave out of the data.
        failures: The first hundred failures.
    """

    rule: str
    num_rows: int
    num_right: int
    num_unreadable: int
    num_blank: int
    num_own_text: int
    num_not_asked: int
    num_compared: int
    num_accepted: int
    num_alike: int
    lost_rows: tuple[int, ...]
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """True if every audited gold can be read, is right on its row, and can be compared with other answers."""
        all_right = self.num_right + self.num_not_asked == self.num_rows
        all_right = all_right and not self.num_own_text and not self.num_blank
        return all_right and not self.num_accepted and self.num_alike <= _MAX_ALIKE_FRAC * self.num_compared

    def cells(self) -> tuple[str, ...]:
        """Return the rule's line of the table."""
        lost = f"{self.num_unreadable} ({self.num_unreadable / max(self.num_rows, 1):.1%})"
        counts = (self.num_own_text, self.num_not_asked, self.num_compared, self.num_accepted, self.num_alike)
        return self.rule, str(self.num_rows), str(self.num_right), lost, *map(str, counts)

    def first_failures(self) -> Iterator[str]:
        """Yield sentences about the first rows of each kind of failure."""
        for kind in FAULTS:
            found = [failure for failure in self.failures if failure.kind == kind]
            yield from (f"{self.rule}, {failure}" for failure in found[:_SHOWN])


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The report of `audit`; `print(report)` gives a table.

    Args:
        rules: One entry per rule that judges correctness.
    """

    rules: tuple[RuleAudit, ...]
    num_rows: int

    @property
    def ok(self) -> bool:
        """True if all rules are ok."""
        return all(rule.ok for rule in self.rules)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        remarks: list[str] = []
        for rule in self.rules:
            if rule.num_not_asked:
                tested = "only that they can be judged, and that doing nothing is not right, was tested"
                remarks.append(f"{rule.rule}, {rule.num_not_asked} rows name no right completion: {tested}.")
            remarks += rule.first_failures()
        verdict = "ok: every gold is read as itself, and none is lost" if self.ok else "not ok: look at the rows below"
        lines = [_HEADINGS, *(rule.cells() for rule in self.rules)]
        return "\n".join([table(lines), "", verdict, *remarks])


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, each column as wide as its widest cell."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

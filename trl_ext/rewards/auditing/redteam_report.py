"""The report of `redteam`, as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trl_ext.rewards.auditing.audit_report import table
from trl_ext.rewards.totals.explanation import shortened

REFUSED = "refused"
NOT_TRIED = "not tried"

_SHOWN = 10  # completions under the table
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Attempt:
    """A cheat on the row where it went furthest.

    Args:
        cheat: Its name.
        row: Number of the row, from 0; None where it could be tried on none: it needs a gold answer that is not known,
            or it might be right by chance.
        completion: The cheat, filled.
        total: What it earned; None without a value.
        bar: What it may earn there.
        verdict: REFUSED, NOT_TRIED, or how it got through.
    """

    cheat: str
    row: int | None
    completion: str
    total: float | None
    bar: float | None
    verdict: str

    @property
    def ok(self) -> bool:
        """True where the cheat did not get through, or was not tried."""
        return self.verdict in (REFUSED, NOT_TRIED)

    @property
    def margin(self) -> float:
        """The amount by which the total is above the bar."""
        return float("-inf") if self.total is None or self.bar is None else self.total - self.bar

    def cells(self) -> tuple[str, ...]:
        """The cheat's line of the table."""
        total, bar = ("-" if value is None else f"{value:.3f}" for value in (self.total, self.bar))
        return self.cheat, total, bar, "" if self.row is None else str(self.row), self.verdict


@dataclass(frozen=True, slots=True)
class RedteamReport:
    """The report of `redteam`; `print(report)` gives a table.

    Args:
        attempts: One per cheat.
        rights: For each row what a right answer earned at best; None where no gold is known.
        bars: For each row what an honest wrong answer, or an empty completion, earned at best.
        num_completions: Completions that were scored for cheats.
        undecided_rows: Rows that were left out: whatever a completion says there, a rule has no value.
    """

    attempts: tuple[Attempt, ...]
    rights: tuple[float | None, ...]
    bars: tuple[float, ...]
    num_completions: int
    undecided_rows: tuple[int, ...] = ()

    @property
    def blind_rows(self) -> tuple[int, ...]:
        """Rows on which a right answer earns no more than a wrong one, so that nothing was tested."""
        pairs = enumerate(zip(self.rights, self.bars, strict=True))
        return tuple(row for row, (right, bar) in pairs if right is not None and right <= bar + _ROUNDING)

    @property
    def through(self) -> tuple[Attempt, ...]:
        """The cheats that got through."""
        return tuple(attempt for attempt in self.attempts if not attempt.ok)

    @property
    def ok(self) -> bool:
        """True where no cheat got through, and a right answer pays on every row."""
        return not self.through and not self.blind_rows

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"ok": self.ok, "blind_rows": self.blind_rows, **asdict(self)}

    def __str__(self) -> str:
        lines = [("cheat", "total", "bar", "row", "verdict"), *(attempt.cells() for attempt in self.attempts)]
        return "\n".join([table(lines), "", *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        tried = [attempt for attempt in self.attempts if attempt.verdict != NOT_TRIED]
        rows = f"{len(self.bars)} row{'s' if len(self.bars) > 1 else ''}"
        yield f"{len(tried)} cheats on {rows}, {self.num_completions} completions: {len(self.through)} got through"
        for attempt in self.through[:_SHOWN]:
            yield f"{attempt.cheat}, row {attempt.row}: {shortened(repr(attempt.completion))}"
        for row in self.blind_rows[:_SHOWN]:
            yield f"row {row}: a right answer earns {self.rights[row]:g} and a wrong one {self.bars[row]:g}"
        if self.undecided_rows:
            shown = ", ".join(map(str, self.undecided_rows[:_SHOWN]))
            yield f"left out, golds undecided (see audit): rows {shown}"
        yield "ok" if self.ok else "not ok"


def worst(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that got through; of several the one furthest above its bar; None of none."""
    return max(attempts, key=lambda attempt: (not attempt.ok, attempt.margin), default=None)

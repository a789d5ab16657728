"""Stop a run whose machine fails too many rows: training on the rest would be training on a bias."""

from collections import deque
from dataclasses import dataclass, field

# Statuses of rows that the machine or a server failed.
FAILED = frozenset({"infra_error", "refused"})
# So many calls in a row without one verdict in time are no longer the completions' doing.
LATE_CALLS = 3
# Below this many rows a share says nothing.
LEAST_ROWS = 20
# Rows over which the share is taken: a few batches, so that a bad minute hours ago does not add up.
WINDOW_ROWS = 2048


@dataclass(slots=True)
class Breaker:
    """Trips when more than `max_frac` of a rule's latest rows failed for want of a machine or a server.

    A row that a worker had to be stopped for may be the completion's doing and does not count, unless all rows of
    several calls end so: a verifier that hangs would else have the run learn from its floor.

    It raises nothing: ranks have to agree on the flag before any of them may stop.

    Args:
        rule: The rule's name, for the sentence.
        max_frac: Share of rows (0 to 1) that may fail.

    Example:
        >>> breaker = Breaker("judge", 0.05)
        >>> breaker.record(rows=100, failed=10, detail="no process could be started")
        >>> breaker.tripped is not None
        True
    """

    rule: str
    max_frac: float
    tripped: str | None = field(default=None, init=False)
    _calls: deque[tuple[int, int]] = field(default_factory=deque, init=False, repr=False)
    _late: tuple[int, ...] = field(default=(), init=False, repr=False)  # Rows of the latest calls without a verdict.

    def record(self, rows: int, failed: int, detail: str = "", late: int = 0) -> None:
        """Count a call of `rows` rows: `failed` had no verdict through the machine's fault, `late` none in time."""
        if rows:
            self._late = (*self._late, rows) if late == rows else ()
        if self.tripped is None and len(self._late) >= LATE_CALLS and sum(self._late) >= LEAST_ROWS:
            self.tripped = (
                f"Rule '{self.rule}' gave no verdict in time for any of the last {sum(self._late)} rows, "
                f"{len(self._late)} calls in a row: it hangs, or it is too slow for its limits. The last one: "
                f"{detail or 'no detail'}. Mend what it waits for, or give it more time (cpu_s, wall_s and batch_s in "
                "Limits, or its own timeout). RuleSet.reset() lets this set go on."
            )
        self._calls.append((rows, failed))
        while sum(rows for rows, _ in self._calls) - self._calls[0][0] >= WINDOW_ROWS:
            self._calls.popleft()
        total, lost = self._counts()
        if self.tripped is None and total >= LEAST_ROWS and lost > self.max_frac * total:
            self.tripped = (
                f"{lost} of the last {total} rows of rule '{self.rule}' were not judged because the machine failed, "
                f"or a server did (allowed: {self.max_frac:.0%}). The last one: {detail or 'no detail'}. Mend that, "
                "lower the load, or raise max_infra_frac or, for workers, batch_s in Limits. RuleSet.reset() lets "
                "this set go on."
            )

    def bearable(self, rows: int) -> int | None:
        """Return how many of the next `rows` may fail; with more it is sure to trip. None: all may."""
        total, lost = self._counts()
        return None if total + rows < LEAST_ROWS else max(0, int(self.max_frac * (total + rows)) - lost)

    def _counts(self) -> tuple[int, int]:
        return sum(rows for rows, _ in self._calls), sum(failed for _, failed in self._calls)

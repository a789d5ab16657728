"""Stop a run whose machine fails too many rows: training on the rest would be training on a bias."""

from collections import deque
from dataclasses import dataclass, field

# Statuses of rows that the machine or a server failed.
FAILED = frozenset({"infra_error", "refused"})
# Below this many rows a share says nothing.
LEAST_ROWS = 20
# Rows over which the share is taken: a few batches, so that a bad minute hours ago does not add up.
WINDOW_ROWS = 2048


@dataclass(slots=True)
class Breaker:
    """Trips when more than `max_frac` of a rule's latest rows failed for want of a machine or a server.

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

    def record(self, rows: int, failed: int, detail: str = "") -> None:
        """Count a call of `rows` rows of which `failed` had no verdict through the machine's fault."""
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

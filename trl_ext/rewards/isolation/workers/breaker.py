"""Stop a run whose machine fails too many rows: training on the rest would be training on a bias."""

from collections import deque
from dataclasses import dataclass, field

# Below this many rows a share says nothing.
LEAST_ROWS = 20
# Rows over which the share is taken: a few batches, so that a bad minute hours ago does not add up.
WINDOW_ROWS = 2048


@dataclass(slots=True)
class Breaker:
    """Trips for good when more than `max_frac` of the latest rows failed for want of a machine.

    It raises nothing: ranks have to agree on the flag before any of them may stop.

    Args:
        max_frac: Share of rows (0 to 1) that may fail.

    Example:
        >>> breaker = Breaker(0.05)
        >>> breaker.record(rows=100, failed=10, detail="no process could be started")
        >>> breaker.tripped is not None
        True
    """

    max_frac: float
    tripped: str | None = field(default=None, init=False)
    _calls: deque[tuple[int, int]] = field(default_factory=deque, init=False, repr=False)

    def record(self, rows: int, failed: int, detail: str = "") -> None:
        """Count a call of `rows` rows of which `failed` had no verdict through the machine's fault."""
        self._calls.append((rows, failed))
        while sum(rows for rows, _ in self._calls) - self._calls[0][0] >= WINDOW_ROWS:
            self._calls.popleft()
        total, lost = (sum(column) for column in zip(*self._calls, strict=True))
        if self.tripped is None and total >= LEAST_ROWS and lost > self.max_frac * total:
            self.tripped = (
                f"{lost} of the last {total} rows that went to workers have no verdict because the machine failed "
                f"(allowed: {self.max_frac:.0%}). The last one: {detail or 'no detail'}. Mend that, lower the load, "
                "or raise batch_s or max_infra_frac in Limits."
            )

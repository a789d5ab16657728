"""Stop a run whose machine fails too many rows: training on the rest would be training on a bias."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mode

# Statuses of rows that the machine or a server failed.
FAILED = frozenset({"infra_error", "refused"})
# So many calls in a row without one verdict in time are no longer the completions' doing.
LATE_CALLS = 3
# Below this many rows a share says nothing.
LEAST_ROWS = 20
# Rows over which the share is taken: a few batches, so that a bad minute hours ago does not add up.
WINDOW_ROWS = 2048
# A judge's first replies: one without a score is the judge's doing, or its settings'. Later it may be a policy's.
FIRST_REPLIES = 64
# A rule of ours that raises costs the row alone, until more than this share of the rows of so many calls end so.
MOST_MISTAKES, MISTAKE_CALLS = 0.01, 20


def share_above(calls: deque[tuple[int, int]], rows: int, lost: int, most_frac: float) -> tuple[int, int] | None:
    """Count a call of `rows` rows, `lost` of which failed; return how many did of how many, or None if not too many.

    Args:
        calls: The last MISTAKE_CALLS calls, which the call is added to. Those to come count as those before.
        most_frac: Share of the rows (0 to 1) that may fail; one row always may.
    """
    calls.append((rows, lost))
    total, failed = (sum(part) for part in zip(*calls, strict=True))
    return (failed, total) if failed > max(1.0, most_frac * MISTAKE_CALLS * total / len(calls)) else None


@dataclass(slots=True)
class Breaker:
    """Trips when more than `max_frac` of a rule's latest rows failed for want of a machine or a server.

    A rule that is shipped may raise for a completion that its authors did not think of, up to 1 % of 20 calls' rows.

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
    _mistakes: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=MISTAKE_CALLS), init=False, repr=False
    )
    _replies: list[str] = field(default_factory=list, init=False, repr=False)
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

    def record_mistakes(self, rows: int, mistakes: int, detail: str) -> None:
        """Count a call of `rows` rows, for so many of which the rule raised. Calls to come count as those before."""
        above = share_above(self._mistakes, rows, mistakes, MOST_MISTAKES)
        if self.tripped is None and above:
            self.tripped = (
                f"Rule '{self.rule}' raised for {above[0]} of the last {above[1]} rows, more than {MOST_MISTAKES:.0%} "
                f"of those of {MISTAKE_CALLS} steps: a bug of trl_ext, please report it. The last one: {detail}"
            )

    def record_replies(self, replies: Sequence[str]) -> None:
        """Look at the first replies of a judge, each given as "" where it holds a score, else as what it says."""
        self._replies = [*self._replies, *replies][:FIRST_REPLIES]
        unread, total = [reply for reply in self._replies if reply], len(self._replies)
        if self.tripped is None and self.max_frac < 1 and total >= LEAST_ROWS and 2 * len(unread) > total:
            cause = mode(reply.partition(":")[0] for reply in unread)
            shown = next(reply for reply in unread if reply.startswith(cause))
            self.tripped = (
                f"{len(unread)} of the first {total} replies to rule '{self.rule}' hold no score. One of them: "
                f"{shown}. Where it was cut off, raise max_tokens, or turn its thoughts off (extra_body). Else ask "
                "for the form that is read: choices, or rubric with pattern of a judge, value of remote. "
                "RuleSet.reset() lets this set go on; max_infra_frac: 1 bears it."
            )

    def bearable(self, rows: int) -> int | None:
        """Return how many of the next `rows` may fail; with more it is sure to trip. None: all may."""
        total, lost = self._counts()
        return None if total + rows < LEAST_ROWS else max(0, int(self.max_frac * (total + rows)) - lost)

    def _counts(self) -> tuple[int, int]:
        return sum(rows for rows, _ in self._calls), sum(failed for _, failed in self._calls)

"""Stop a run if the machine fails too many rows: training on the rest would be biased."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import NamedTuple

FAILED = frozenset({"infra_error", "refused"})  # statuses of rows that the machine or a server failed
LATE_CALLS = 3  # calls in a row without any verdict in time, which the completions cannot cause
LEAST_ROWS = 20  # Below this many rows a share is not meaningful.
WINDOW_ROWS = 2048  # Rows of the share: a few batches, so that failures hours ago do not count.
# In a judge's first replies a missing score is due to the judge or its settings; later the policy may cause it.
FIRST_REPLIES = 64
# Largest share of rows for which a shipped rule may raise, over this many calls.
MOST_MISTAKES, MISTAKE_CALLS = 0.01, 20


class Losses(NamedTuple):
    """Rows of the last calls: the number that failed, and of all."""

    failed: int
    total: int


def share_above(calls: deque[tuple[int, int]], rows: int, lost: int, most_frac: float) -> Losses | None:
    """Count a call of `rows` rows, `lost` of which failed; return the losses if too many failed, else None.

    Args:
        calls: The last MISTAKE_CALLS calls, to which the call is added. Missing calls count as the present calls.
        most_frac: Share of the rows (0 to 1) that may fail; one row always may.
    """
    calls.append((rows, lost))
    total, failed = (sum(part) for part in zip(*calls, strict=True))
    return Losses(failed, total) if failed > max(1.0, most_frac * MISTAKE_CALLS * total / len(calls)) else None


@dataclass(slots=True)
class Breaker:
    """Trips when more than `max_frac` of a rule's latest rows failed because of the machine or a server.

    A shipped rule may raise for up to 1 % of 20 calls' rows. The completion may cause a stopped row, which does not
    count, unless all rows of several calls end so: a verifier that hangs would train the run on its floor.

    It raises nothing: ranks have to agree on the flag before any of them may stop.

    Args:
        rule: The rule's name, for messages.
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
        """Count a call, and trip if too many rows of the last calls have no verdict.

        Args:
            rows: Rows of the call.
            failed: Rows without a verdict because of the machine.
            detail: Why the last of them has none, for the message.
            late: Rows without a verdict in time.
        """
        if rows:
            self._late = (*self._late, rows) if late == rows else ()
        if self.tripped is None and len(self._late) >= LATE_CALLS and sum(self._late) >= LEAST_ROWS:
            self.tripped = (
                f"Rule '{self.rule}' gave no verdict in time for any of the last {sum(self._late)} rows, "
                f"{len(self._late)} calls in a row: it hangs, or it is too slow for its limits. The last row: "
                f"{detail or 'no detail'}. Repair its service, or give it more time (cpu_s, wall_s and batch_s in "
                "Limits, or its own timeout). RuleSet.reset() lets this set go on."
            )
        self._calls.append((rows, failed))
        while sum(rows for rows, _ in self._calls) - self._calls[0][0] >= WINDOW_ROWS:
            self._calls.popleft()
        lost, total = self._losses()
        if self.tripped is None and total >= LEAST_ROWS and lost > self.max_frac * total:
            self.tripped = (
                f"{lost} of the last {total} rows of rule '{self.rule}' were not judged because the machine failed, "
                f"or a server did (allowed: {self.max_frac:.0%}). The last error: {detail or 'no detail'}. Repair it, "
                "lower the load, or raise max_infra_frac or, for workers, batch_s in Limits. RuleSet.reset() lets "
                "this set go on."
            )

    def record_mistakes(self, rows: int, mistakes: int, detail: str) -> None:
        """Count a call of `rows` rows, for `mistakes` of which the rule raised."""
        above = share_above(self._mistakes, rows, mistakes, MOST_MISTAKES)
        if self.tripped is None and above:
            self.tripped = (
                f"Rule '{self.rule}' raised for {above.failed} of the last {above.total} rows, more than "
                f"{MOST_MISTAKES:.0%} of the rows of {MISTAKE_CALLS} steps: a bug of trl_ext, please report it. The "
                f"last: {detail}"
            )

    def record_replies(self, replies: Sequence[str]) -> None:
        """Count a judge's first replies, each given as "" if it holds a score, else as its text."""
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
        """Return how many of the next `rows` may fail without a trip. None: all."""
        lost, total = self._losses()
        return None if total + rows < LEAST_ROWS else max(0, int(self.max_frac * (total + rows)) - lost)

    def _losses(self) -> Losses:
        return Losses(sum(failed for _, failed in self._calls), sum(rows for rows, _ in self._calls))

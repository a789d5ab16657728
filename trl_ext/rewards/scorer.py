"""Judge rows by rules: inline rules here, the others in the worker pool, each different row once.

Legend: a column is one rule's verdicts, one per row.
"""

import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from trl_ext.errors import RuleError
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool, shared_pool
from trl_ext.rewards.rule import Row, Rule, Verdict
from trl_ext.rewards.shaping import applies

# Largest value and contribution that is let through: TRL keeps rewards in float32 and squares them for the group's
# standard deviation, which overflows from about 1.8e19.
LARGEST = 1e15
# The verdict on a row that the rule is not for, and its key.
SKIPPED = Verdict(None, "skipped")
_SKIP = "skipped"

logger = logging.getLogger("trl_ext.rewards")
_warned: set[Hashable] = set()


@dataclass(slots=True)
class Column:
    """One rule's verdicts.

    Args:
        verdicts: One per row; values are finite or None.
        ms: Milliseconds of every verdict that was computed, not remembered.
        hits: Rows whose verdict was remembered, from the cache or from an equal row of the batch.
    """

    verdicts: list[Verdict]
    ms: list[float] = field(default_factory=list)
    hits: int = 0


@dataclass(slots=True)
class Pending:
    """A rule's rows on their way through the pool.

    Args:
        keys: For each row the key that its verdict depends on.
        known: Verdicts by their key.
        sent: The keys whose verdict the pool gives, in the order of its answers, each with the first row that has it.
    """

    keys: list[Hashable]
    known: dict[Hashable, Verdict]
    sent: dict[Hashable, int]


class VerdictCache:
    """Keeps the verdicts used last, so that a group's repeated answers are judged once. Thread-safe.

    Args:
        size: Most verdicts that are kept.
    """

    def __init__(self, size: int = 50_000):
        self.size = size
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, Verdict] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Verdict | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, verdict: Verdict) -> None:
        """Keep a verdict, unless the machine or a bug brought it about and not the row."""
        if verdict.status in ("infra_error", "error"):
            return
        with self._lock:
            self._kept[key] = verdict
            self._kept.move_to_end(key)
            if len(self._kept) > self.size:
                self._kept.popitem(last=False)


class Scorer:
    """Judges rows by rules. Pickles as its settings; pool and cache belong to a process.

    Args:
        limits: Limits of the worker pool.
        isolate: False runs all rules in this process.
        on_error: "stop" raises a RuleError for an exception in a rule; "floor" reports it once, and the row earns the
            rule's floor.
    """

    def __init__(self, limits: Limits, isolate: bool, on_error: str):
        self.limits = limits
        self.isolate = isolate
        self.on_error = on_error
        self.cache = VerdictCache()
        self._started: tuple[Sequence[Rule], list[Row], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Scorer, (self.limits, self.isolate, self.on_error)

    @property
    def pool(self) -> WorkerPool:
        """The process's pool with these limits, started by its first row."""
        return shared_pool(self.limits)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def restarts(self) -> int:
        """Workers that had to be started again so far."""
        return self.pool.stats().restarts

    def start(self, rules: Sequence[Rule], rows: list[Row]) -> None:
        """Begin with the rules that run in workers; the next call for equal rows finds their rows under way."""
        if any(self._isolated(rule) for rule in rules):
            self._started = (rules, rows, self._submit(rules, rows))

    def columns(self, rules: Sequence[Rule], rows: list[Row]) -> list[Column]:
        """Judge all rows by all rules: one column per rule."""
        under_way = self._started_with(rules, rows) or self._submit(rules, rows)
        found = [None if self._isolated(rule) else self._inline(rule, rows) for rule in rules]
        remote = iter(self._collected(rules, rows, under_way))
        return [next(remote) if column is None else column for column in found]

    # Inline ---------------------------------------------------------------------------------------------------------

    def _inline(self, rule: Rule, rows: list[Row]) -> Column:
        together = getattr(rule, "score_rows", None)
        if together is not None:
            return self._together(rule, together, rows)
        column = Column([])
        clock = time.perf_counter
        for index, row in enumerate(rows):
            if not applies(rule.when, row.columns):
                column.verdicts.append(SKIPPED)
                continue
            start = clock()
            column.verdicts.append(self._checked(rule, row, index))
            column.ms.append(1e3 * (clock() - start))
        return column

    def _together(self, rule: Rule, score_rows: Callable[..., list[Verdict]], rows: list[Row]) -> Column:
        """Have a rule that starts processes of its own judge all rows, as many at a time as there are workers."""
        wanted = [row for row in rows if applies(rule.when, row.columns)]
        start = time.perf_counter()
        found = iter(score_rows(wanted, self.limits.num_workers))
        ms = 1e3 * (time.perf_counter() - start) / max(len(wanted), 1)
        verdicts = [finite(rule, next(found)) if applies(rule.when, row.columns) else SKIPPED for row in rows]
        return Column(verdicts, [ms] * len(wanted))

    def _checked(self, rule: Rule, row: Row, index: int) -> Verdict:
        try:
            return finite(rule, judged(rule, row))
        # SystemExit, too: a rule that exits must not end a training run without a word.
        except (Exception, SystemExit) as error:
            message = raised_message(rule, row, index, error)
            if self.on_error == "stop":
                raise RuleError(message) from error
            return self._floored(rule, message)

    def _floored(self, rule: Rule, message: str) -> Verdict:
        warn_once(("raised", rule.name), f"{message} Such rows earn {rule.floor}, as on_error='floor' says.")
        return Verdict(rule.floor, "error", message)

    # In workers -----------------------------------------------------------------------------------------------------

    def _isolated(self, rule: Rule) -> bool:
        return self.isolate and rule.tier != "inline"

    def _submit(self, rules: Sequence[Rule], rows: list[Row]) -> tuple[list[Pending], Future | None]:
        pending, tasks = [], []
        for rule in rules:
            if self._isolated(rule):
                part, wanted = self._pending(rule, rows)
                pending.append(part)
                tasks += [(rule, row) for row in wanted]
        return pending, self.pool.submit(tasks) if tasks else None

    def _pending(self, rule: Rule, rows: list[Row]) -> tuple[Pending, list[Row]]:
        """Split a rule's rows into known verdicts and rows to judge: one of all that are equal to the rule."""
        same = (rule.name, repr(rule))
        part = Pending([], {_SKIP: SKIPPED}, {})
        for index, row in enumerate(rows):
            key = self._key(rule, same, row, index)
            part.keys.append(key)
            if key in part.known or key in part.sent:
                continue
            kept = self.cache.get(key)
            if kept is None:
                part.sent[key] = index
            else:
                part.known[key] = kept
        return part, [rows[index] for index in part.sent.values()]

    def _key(self, rule: Rule, same: Hashable, row: Row, index: int) -> Hashable:
        if not applies(rule.when, row.columns):
            return _SKIP
        try:
            key = rule.cache_key(row)
        except Exception as error:
            raise RuleError(raised_message(rule, row, index, error)) from error
        # Without a key of the rule's own nothing is shared, within the batch and beyond it.
        return index if key is None else (same, key)

    def _started_with(self, rules: Sequence[Rule], rows: list[Row]) -> tuple[list[Pending], Future | None] | None:
        started, self._started = self._started, None
        if started is None or started[0] is not rules:
            return None
        try:
            return started[2] if started[1] == rows else None
        except (ValueError, RuntimeError):  # Arrays in a column have no single truth; equal ones are the same object.
            return None

    def _collected(
        self, rules: Sequence[Rule], rows: list[Row], under_way: tuple[list[Pending], Future | None]
    ) -> list[Column]:
        pending, future = under_way
        answers = iter(future.result() if future else ())
        isolated = [rule for rule in rules if self._isolated(rule)]
        columns = []
        for rule, part in zip(isolated, pending, strict=True):
            column = Column([], hits=len(part.keys) - len(part.sent) - part.keys.count(_SKIP))
            for key, index in part.sent.items():
                answer = next(answers)
                column.ms.append(answer.ms)
                part.known[key] = self._accepted(rule, answer.verdict, rows[index], index)
                if isinstance(key, tuple):
                    self.cache.put(key, part.known[key])
            column.verdicts = [part.known[key] for key in part.keys]
            columns.append(column)
        if isolated and self.pool.tripped:
            raise RuleError(self.pool.tripped)
        return columns

    def _accepted(self, rule: Rule, verdict: Verdict, row: Row, index: int) -> Verdict:
        if verdict.status != "error":
            return finite(rule, verdict)
        message = f"Rule '{rule.name}' raised (row {index}, completion {row.text[:200]!r}):\n{verdict.detail}"
        if self.on_error == "stop":
            raise RuleError(message)
        return self._floored(rule, message)


def judged(rule: Rule, row: Row) -> Verdict:
    """The rule's verdict, its value a float or None; TypeError where the rule returns anything else."""
    verdict = rule.score(row)
    if not isinstance(verdict, Verdict):
        raise TypeError(f"score() returned {verdict!r}, not a Verdict")
    if verdict.value is None or type(verdict.value) is float:
        return verdict
    return Verdict(float(verdict.value), verdict.status, verdict.detail)


def finite(rule: Rule, verdict: Verdict) -> Verdict:
    """The verdict, or the rule's floor where the value would spoil the model's weights."""
    value = verdict.value
    if value is None or (abs(value) <= LARGEST and abs(value * rule.weight) <= LARGEST):
        return verdict
    return Verdict(rule.floor, "not_finite", f"the rule gave {value}, weight {rule.weight}")


def raised_message(rule: Rule, row: Row, index: int, error: BaseException) -> str:
    """The sentence for an exception in a rule; it carries the place, which a pickled error would lose."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"Rule '{rule.name}' raised {type(error).__name__}: {error} (row {index}, {Path(place.filename).name} line "
        f"{place.lineno}). Completion: {row.text[:200]!r}. Columns: {', '.join(row.columns) or 'none'}. "
        "Mend the rule, or the row if its data is wrong."
    )


def warn_once(key: Hashable, message: str) -> None:
    """Log the message unless this process has logged one with this key: a rule is asked thousands of times."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)

"""Judge rows by rules, in this process, in worker processes or by a server. Equal rows are judged once.

Legend: a column is one rule's verdicts, one per row.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, applies, as_verdict, place_of
from trl_ext.rewards.isolation.workers.breaker import FAILED, MISTAKE_CALLS, MOST_MISTAKES, Breaker
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool, shared_pool
from trl_ext.rewards.isolation.workers.wire import Judged
from trl_ext.rewards.totals.composition import Gate, gate_of, gate_state, shaped_value

# Largest value and contribution: TRL squares float32 rewards for the group's standard deviation, which overflows from
# about 1.8e19.
LARGEST = 1e15
# The verdict on a row that the rule's `when` excludes, and its key.
SKIPPED = Verdict(None, "skipped")
_SKIP = "skipped"
# Verdicts of an AsyncRule on rows whose gates are not open, by the state of the gates.
_UNASKED = "not asked: its gate is shut"
_NO_GATE = Verdict(None, "gated", "not asked: its gate has no value")
_UNASKED_KEYS = (_SKIP, "shut", "unknown")

logger = logging.getLogger("trl_ext.rewards")
_warned: set[Hashable] = set()


@dataclass(slots=True)
class Column:
    """One rule's verdicts, one per row, with finite values or None."""

    verdicts: list[Verdict]
    ms: list[float] = field(default_factory=list)  # milliseconds of each computed verdict
    hits: int = 0  # rows whose verdict came from the cache or from an equal row of the batch
    costs: Mapping[str, float] = field(default_factory=dict)  # of an AsyncRule's calls, by the name of the metric


@dataclass(slots=True)
class Pending:
    """A rule's rows while workers, a server or `score_batch` judge them."""

    keys: list[Hashable]  # cache key of each row
    known: dict[Hashable, Verdict]
    sent: dict[Hashable, int]  # keys to be judged, in the order of the answers, with the index of their first row
    # Waits for the verdicts of `sent` and returns them with the costs of their calls.
    answers: Callable[[], tuple[Sequence[Judged], Mapping[str, float]]] = lambda: ((), {})
    cancel: Callable[[], object] = lambda: None

    def rows_to_judge(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `sent`, in the order of the answers."""
        return [rows[index] for index in self.sent.values()]


@dataclass(slots=True)
class Early:
    """Rows of a later call that are being judged, with the rules that run outside this process's code."""

    rows: list[Row]
    parts: list[tuple[Rule, Pending]]

    def wait(self) -> None:
        for _, part in self.parts:
            part.answers()


class VerdictCache:
    """Cache of the `size` verdicts used last: a group's repeated answers are judged once. Thread-safe."""

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
        """Store a verdict, unless the machine or a bug caused it, or a judge gave no score."""
        if verdict.status in FAILED or verdict.status in ("error", "no_score"):
            return
        with self._lock:
            self._kept[key] = verdict
            self._kept.move_to_end(key)
            if len(self._kept) > self.size:
                self._kept.popitem(last=False)


class Scorer:
    """Judge of rows by rules. Only its settings are pickled; pool and cache belong to a process.

    `isolate=False` runs all rules in this process. After an exception in a rule `on_error="stop"` raises a RuleError;
    "floor" logs it once and gives the rule's floor.
    """

    def __init__(self, limits: Limits, isolate: bool, on_error: str):
        self.limits = limits
        self.isolate = isolate
        self.on_error = on_error
        self.cache = VerdictCache()
        self._breakers: dict[str, Breaker] = {}
        self._counting = Lock()  # of the breakers: a server scores in several threads
        self._started: tuple[Sequence[Rule], list[Row], list[Pending | None]] | None = None
        self._early: dict[str, list[Column]] = {}  # columns of rows judged early, by rule

    def __reduce__(self) -> tuple[Any, ...]:
        return Scorer, (self.limits, self.isolate, self.on_error)

    @property
    def pool(self) -> WorkerPool:
        """The process's pool with these limits. The first row starts it."""
        return shared_pool(self.limits)

    def reset(self) -> None:
        """Forget failures of the machine and of servers."""
        self._breakers.clear()

    def start(self, rules: Sequence[Rule], rows: list[Row]) -> None:
        """Start the rules that run elsewhere; the next `columns` call for equal rows collects their verdicts."""
        if any(map(self.runs_elsewhere, rules)):
            self._started = (rules, rows, self._submit(rules, rows))

    def runs_elsewhere(self, rule: Rule) -> bool:
        """Return True if workers or a server judge the rule's rows while this process does something else."""
        return rule.is_async or (self.isolate and rule.tier != "inline" and not gives_batches(rule))

    def begin(self, rules: Sequence[Rule], rows: list[Row]) -> Early:
        """Start judging some rows of a later call by the rules that run elsewhere and have no gate. Thread-safe."""
        parts = zip(rules, self._submit(rules, rows), strict=True)
        return Early(rows, [(rule, part) for rule, part in parts if part is not None])

    def remember(self, early: Early) -> None:
        """Wait for the rows of `begin` and store their verdicts; the later call repeats rules that raised."""
        for rule, part in early.parts:
            with suppress(RuleError):
                self._early.setdefault(rule.name, []).append(self._collect(rule, early.rows, part))

    def columns(self, rules: Sequence[Rule], rows: list[Row]) -> list[Column]:
        """Judge all rows by all rules: one column per rule."""
        under_way = self._started_with(rules, rows) or self._submit(rules, rows)
        try:
            # First the rules of this process, while the others are running; last the rules with gates, because their
            # calls cost money.
            gates = gates_of_waiting(rules)
            found: dict[int, Column] = {}
            for position, part in enumerate(under_way):
                if part is None and position not in gates:
                    rule = rules[position]
                    found[position] = (self._in_batches if gives_batches(rule) else self._inline)(rule, rows)
            for position, part in enumerate(under_way):
                if part is not None:
                    found[position] = self._collect(rules[position], rows, part)
            for position in sorted(gates, key=lambda position: len(gates[position])):
                found[position] = self._behind_gates(rules, position, gates[position], found, rows)
            return [self._with_early(rule, found[position]) for position, rule in enumerate(rules)]
        except BaseException:  # Nothing will collect the calls that still run; KeyboardInterrupt, too.
            cancel(under_way)
            raise

    def _with_early(self, rule: Rule, column: Column) -> Column:
        """Return the column with times and costs of the rows that were judged early and came from the cache."""
        for early in self._early.pop(rule.name, ()):
            column.ms += early.ms
            column.hits = max(column.hits - len(early.ms), 0)
            column.costs = joined_costs(column.costs, early.costs)
        return column

    # In this process ------------------------------------------------------------------------------------------------

    def _in_batches(self, rule: Rule, rows: list[Row]) -> Column:
        part = self._pending(rule, rows)
        wanted = part.rows_to_judge(rows)
        part.answers = lambda: (self._batch(rule, wanted) if wanted else (), {})
        return self._collect(rule, rows, part)

    def _inline(self, rule: Rule, rows: list[Row]) -> Column:
        column = Column([])
        clock = time.perf_counter
        start = clock()
        for index, row in enumerate(rows):
            if rule.when is not None and not applies(rule.when, row.columns):
                column.verdicts.append(SKIPPED)
                continue
            column.verdicts.append(self._checked(rule, row, index))
            end = clock()
            column.ms.append(1e3 * (end - start))
            start = end
        failed = [verdict.detail for verdict in column.verdicts if verdict.status in FAILED]
        raised = [verdict.detail for verdict in column.verdicts if verdict.status == "error"]
        if failed or raised or rule.name in self._breakers:
            self._record(rule, len(column.ms), failed, raised=raised)
        return column

    def _batch(self, rule: Rule, rows: list[Row]) -> list[Judged]:
        """Judge all rows by one call of `score_batch`; if it raises, each row gets that as its verdict."""
        start = time.perf_counter()
        try:
            verdicts = list(map(as_verdict, rule.score_batch(rows)))
            if len(verdicts) != len(rows):
                raise TypeError(f"score_batch() returned {len(verdicts)} verdicts for {len(rows)} rows")
        except (Exception, SystemExit) as error:
            message = f"{type(error).__name__}: {error} ({place_of(error)}, {len(rows)} rows in score_batch)"
            if not self._costs_the_row(rule, type(error).__name__):
                raise RuleError(f"Rule '{rule.name}' raised {message}. Mend the rule, or the data.") from error
            verdicts = [Verdict(None, "error", message)] * len(rows)
        ms = 1e3 * (time.perf_counter() - start) / len(rows)
        return [Judged(verdict, ms, verdict.status in FAILED) for verdict in verdicts]

    def _checked(self, rule: Rule, row: Row, index: int) -> Verdict:
        try:
            return finite(rule, as_verdict(rule.score(row)))
        # SystemExit, too: a rule that exits must not end a training run without a message.
        except (Exception, SystemExit) as error:
            message = raised_message(rule, row, index, error)
            if not self._costs_the_row(rule, type(error).__name__):
                raise RuleError(message) from error
            return self._floored(rule, row, message, place_of(error))

    def _costs_the_row(self, rule: Rule, error: str) -> bool:
        """Return True if an exception costs only its row: with on_error="floor", or by a bug of a shipped rule."""
        # A RuleError of a shipped rule is about the data, and stops the run.
        return self.on_error == "floor" or (is_shipped(rule) and error != RuleError.__name__)

    def _floored(self, rule: Rule, row: Row, message: str, place: str = "") -> Verdict:
        """Return the verdict of a row that an exception costs, the rule's floor, and warn.

        Args:
            rule: The rule that raised.
            row: The row that it judged.
            message: Names the exception, the row and the place.
            place: File and line of the exception; rows of one place are warned of once.
        """
        if self.on_error == "floor":
            warn_once(("raised", rule.name), f"{message} Such rows earn {rule.floor}, as on_error='floor' demands.")
        else:
            columns = ", ".join(f"{name}={value!r:.200}" for name, value in row.columns.items())
            warn_once(
                ("raised", rule.name, place),
                f"{message} Its data: {columns or 'none'}. The row earns {rule.floor}: a bug of trl_ext, please "
                f"report it. When more than {MOST_MISTAKES:.0%} of the rows of {MISTAKE_CALLS} steps end so, the run "
                "stops.",
            )
        return Verdict(rule.floor, "error", message)

    # In workers, or waiting for a server ----------------------------------------------------------------------------

    def _submit(self, rules: Sequence[Rule], rows: list[Row]) -> list[Pending | None]:
        """Start the rules that run elsewhere; None for rules that run in this process or have a gate."""
        self._stop_if_tripped(rules)
        parts: list[Pending | None] = []
        tasks: list[tuple[Rule, Row]] = []
        waiting: list[tuple[Pending, int]] = []  # with the index of its first task
        gates = gates_of_waiting(rules)
        for position, rule in enumerate(rules):
            if position in gates or not self.runs_elsewhere(rule):
                parts.append(None)
                continue
            part = self._pending(rule, rows)
            parts.append(part)
            wanted = part.rows_to_judge(rows)
            if rule.is_async:
                self._ask(rule, wanted, part)
            else:
                waiting.append((part, len(tasks)))
                tasks += [(rule, row) for row in wanted]
        if tasks:
            future = self.pool.submit(tasks)
            for part, first in waiting:
                part.answers = partial(slice_of, future, first, first + len(part.sent))
        return parts

    def _behind_gates(
        self, rules: Sequence[Rule], position: int, gates: list[Gate], found: Mapping[int, Column], rows: list[Row]
    ) -> Column:
        """Judge by an AsyncRule the rows whose gates are open; a shut gate saves the call.

        Args:
            rules: All rules of the set.
            position: Place of the AsyncRule among them.
            gates: The gates that must be open for the rule, with the status that each asks for.
            found: Verdicts of the rules judged so far, by place.
            rows: The batch.
        """
        rule = rules[position]
        states = []
        here = [(i, status) for i, (_, status) in enumerate(gates)]
        for verdicts in zip(*(found[gate].verdicts for gate, _ in gates), strict=True):
            values = [shaped_value(rules[gate], one) for (gate, _), one in zip(gates, verdicts, strict=True)]
            states.append(gate_state(values, verdicts, here))
        part = self._pending(rule, rows, states)
        self._ask(rule, part.rows_to_judge(rows), part)
        return self._collect(rule, rows, part)

    def _ask(self, rule: Any, rows: list[Row], part: Pending) -> None:
        with self._counting:
            bearable = self._breaker(rule).bearable(len(rows))
        future = rule.submit(rows, bearable)
        part.answers, part.cancel = future.result, future.cancel

    def _pending(self, rule: Rule, rows: list[Row], gates: Sequence[str] = ()) -> Pending:
        """Split a rule's rows into known verdicts and first rows of other keys; `gates` has each row's gate state."""
        same = (rule.name, repr(rule))
        part = Pending([], {_SKIP: SKIPPED, "shut": Verdict(rule.floor, "gated", _UNASKED), "unknown": _NO_GATE}, {})
        for index, row in enumerate(rows):
            if not applies(rule.when, row.columns):
                key: Hashable = _SKIP
            elif gates and gates[index] != "open":
                key = gates[index]
            else:
                try:
                    own = rule.cache_key(row)
                except Exception as error:
                    raise RuleError(raised_message(rule, row, index, error)) from error
                # Without a cache key no verdict is shared, neither in the batch nor with later batches.
                key = index if own is None else (same, own)
            part.keys.append(key)
            if key in part.known or key in part.sent:
                continue
            kept = self.cache.get(key)
            if kept is None:
                part.sent[key] = index
            else:
                part.known[key] = kept
        return part

    def _started_with(self, rules: Sequence[Rule], rows: list[Row]) -> list[Pending | None] | None:
        started, self._started = self._started, None
        if started is None:
            return None
        try:
            if started[0] is rules and started[1] == rows:
                return started[2]
        except (ValueError, RuntimeError):  # Arrays in a column have no single truth value.
            pass
        cancel(started[2])
        return None

    def _collect(self, rule: Rule, rows: list[Row], part: Pending) -> Column:
        answers, costs = part.answers()
        unasked = sum(key in _UNASKED_KEYS for key in part.keys)
        column = Column([], hits=len(part.keys) - len(part.sent) - unasked, costs=costs)
        for (key, index), answer in zip(part.sent.items(), answers, strict=True):
            column.ms.append(answer.ms)
            verdict, row = answer.verdict, rows[index]
            if verdict.status == "error":
                message = f"Rule '{rule.name}' raised (row {index}, completion {row.text[:200]!r}):\n{verdict.detail}"
                if not self._costs_the_row(rule, verdict.detail.partition(":")[0]):
                    raise RuleError(message)
                part.known[key] = self._floored(rule, row, message, verdict.detail.partition("\n")[0])
            else:
                part.known[key] = finite(rule, verdict)
            if isinstance(key, tuple):
                self.cache.put(key, part.known[key])
        failed = [answer.verdict.detail for answer in answers if answer.failed]
        late = [answer.verdict.detail for answer in answers if answer.late]
        raised = [a.verdict.detail for a in answers if a.verdict.status == "error"]
        replies = [answer.verdict for answer in answers if answer.verdict.status in ("ok", "no_score")]
        if rule.is_async:
            with self._counting:
                self._breaker(rule).record_replies([reply.detail * (reply.status == "no_score") for reply in replies])
        self._record(rule, len(part.sent), failed, late, raised)
        column.verdicts = [part.known[key] for key in part.keys]
        return column

    # Failures of the machine and of servers -------------------------------------------------------------------------

    def _breaker(self, rule: Rule) -> Breaker:
        return self._breakers.setdefault(rule.name, Breaker(rule.name, self.limits.max_infra_frac))

    def _record(
        self, rule: Rule, num_rows: int, failed: list[str], late: Sequence[str] = (), raised: Sequence[str] = ()
    ) -> None:
        """Count a call in the rule's breaker, and raise RuleError if the breaker has tripped.

        Args:
            rule: The rule.
            num_rows: Rows that it judged in this call.
            failed: Details of rows without a verdict because of the machine.
            late: Details of rows without a verdict in time.
            raised: Messages of rows in which the rule raised.
        """
        with self._counting:
            self._breaker(rule).record(num_rows, len(failed), ["", *late, *failed][-1], len(late))
            if num_rows and self.on_error == "stop" and is_shipped(rule):
                self._breaker(rule).record_mistakes(num_rows, len(raised), ["", *raised][-1])
        self._stop_if_tripped([rule])

    def _stop_if_tripped(self, rules: Iterable[Rule]) -> None:
        for rule in rules:
            tripped = rule.name in self._breakers and self._breakers[rule.name].tripped
            if tripped:
                raise RuleError(tripped)


def is_shipped(rule: Rule) -> bool:
    """Return True for a rule of trl_ext; `call` runs the user's function."""
    kind = type(rule)
    return kind.__module__.startswith("trl_ext.rewards.rules.") and kind.__name__ != "Call"


def joined_costs(costs: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Add the costs of two batches of an AsyncRule; `latency_s` is a mean over `calls`."""
    joined = {name: costs.get(name, 0) + others.get(name, 0) for name in [*costs, *others]}
    if joined.get("calls"):
        spent_s = (one.get("latency_s", 0.0) * one.get("calls", 0) for one in (costs, others))
        joined["latency_s"] = sum(spent_s) / joined["calls"]
    return joined


def cancel(parts: Iterable[Pending | None]) -> None:
    for part in parts:
        if part:
            part.cancel()


def gates_of_waiting(rules: Sequence[Rule]) -> dict[int, list[Gate]]:
    """Return the position and the gates of each AsyncRule that has gates in the set."""
    positions = {rule.name: position for position, rule in enumerate(rules)}
    found = {}
    for position, rule in enumerate(rules):
        gates: list[Gate] = []
        name, status = gate_of(rule) if rule.is_async else ("", "")
        while name in positions:
            gates.append((positions[name], status))
            name, status = gate_of(rules[positions[name]])
        if gates:
            found[position] = gates
    return found


def gives_batches(rule: Rule) -> bool:
    return type(rule).score_batch is not Rule.score_batch


def slice_of(future: "Future[list[Judged]]", first: int, end: int) -> tuple[Sequence[Judged], Mapping[str, float]]:
    return future.result()[first:end], {}


def finite(rule: Rule, verdict: Verdict) -> Verdict:
    """Return the verdict, or the rule's floor if the value would spoil the model's weights."""
    value = verdict.value
    # NaN compares as False.
    if value is None or (abs(value) <= LARGEST and abs(value * rule.weight) <= LARGEST):
        return verdict
    return Verdict(rule.floor, "not_finite", f"the rule gave {value}, weight {rule.weight}")


def raised_message(rule: Rule, row: Row, index: int, error: BaseException) -> str:
    """Return the message for an exception in a rule, with file and line, which a pickled error would lose.

    Args:
        rule: The rule that raised.
        row: The row that it judged.
        index: Place of the row in the batch.
        error: The exception.
    """
    return (
        f"Rule '{rule.name}' raised {type(error).__name__}: {error} (row {index}, {place_of(error)}). "
        f"Completion: {row.text[:200]!r}. Columns: {', '.join(row.columns) or 'none'}. "
        "Mend the rule, or the row if its data is wrong."
    )


def warn_once(key: Hashable, message: str) -> None:
    """Log the message once per key and process: a rule runs thousands of times."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)

"""Worker processes for rules that may hang, crash or eat memory on hostile text.

    trainer  --  fork server  --  worker
                              --  worker

`WorkerPool.run` gives one verdict per row whatever the completions hold: a row that overruns its limits is stopped and
gets the rule's floor, and no other row's verdict depends on it. Statuses besides the rule's own:

    timeout      used more processor or wall-clock time than `Limits` lets it; the floor
    too_complex  needed more memory than `Limits` lets it, or nested deeper than Python's stack; the floor
    crashed      ended its worker, or broke its connection; the floor
    error        the rule raised; no value, and the detail says what and where, then the traceback
    infra_error  no worker could be had, or the call's time was up before the row began; no value

Linux only. Elsewhere rules run where they are called, without limits, and a warning says so once.
"""

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

from trl_ext.rewards.base.rule import Row, Rule, Verdict, as_verdict
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.request import Judged, Request, packed

if TYPE_CHECKING:
    from trl_ext.rewards.isolation.workers.server_thread import ServerThread  # Needs Linux.

# Rows whose time is kept.
LATEST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of a pool since it was made.

    Args:
        rows: Rows by their verdict's status.
        restarts: Workers that were replaced, after a stopped row or because a row left something behind.
        ms: Milliseconds of the latest 4,096 rows, each from its start in the worker; 0.0 for rows that never began.
    """

    rows: dict[str, int]
    restarts: int
    ms: tuple[float, ...]


class WorkerPool:
    """Judges rows in processes that can be killed; starts them with the first call.

    Calls may come from any thread, and several at a time. The object pickles as its limits: a spawned process starts
    workers of its own, and so does a forked one.

    Example:
        with WorkerPool(Limits(cpu_s=1)) as pool:
            verdicts = pool.run([(rule, row) for row in rows])
    """

    _thread: "ServerThread | None"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._reset()

    def run(self, tasks: Iterable[tuple[Rule, Row]]) -> list[Verdict]:
        """One verdict per task, in their order. RuleError or DataError for what cannot be sent to a worker."""
        return [judged.verdict for judged in self.submit(tasks).result()]

    def submit(self, tasks: Iterable[tuple[Rule, Row]]) -> "Future[list[Judged]]":
        """Start `run` and return at once; in an event loop, `await asyncio.wrap_future(pool.submit(tasks))`."""
        tasks = list(tasks)
        future: Future[list[Judged]] = Future()
        future.set_running_or_notify_cancel()  # What a worker judges cannot be taken back.
        if not tasks or not supported(sys.platform):
            future.set_result([inline(rule, row) for rule, row in tasks])
            return future
        request = packed(tasks, future)
        while not self._connected().send(request):
            pass
        return future

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def stats(self) -> PoolStats:
        """The pool's counts so far."""
        with self._lock:
            return PoolStats(dict(self._rows), self._restarts, tuple(self._ms))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self.limits,)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread = None
        self._rows: Counter[str] = Counter()
        self._restarts = 0
        self._ms: deque[float] = deque(maxlen=LATEST_ROWS)

    def _connected(self) -> "ServerThread":
        """The thread of the fork server; a new one in a forked child, whose copy has no thread."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._thread is None or self._thread.closed:
                from trl_ext.rewards.isolation.workers.server_thread import ServerThread

                # The thread must not keep a pool alive that nobody holds any more.
                pool = weakref.ref(self)
                self._thread = ServerThread(self.limits, partial(finish, pool), partial(count_restarts, pool))
                weakref.finalize(self, self._thread.close)  # At the interpreter's end too.
            return self._thread


def shared_pool(limits: Limits) -> WorkerPool:
    """This process's pool with these limits: several rule sets need no workers of their own."""
    return _POOLS.setdefault(limits, WorkerPool(limits))  # Atomic; a pool that is not used has no processes.


_POOLS: dict[Limits, WorkerPool] = {}


def finish(pool: "weakref.ref[WorkerPool]", request: Request) -> None:
    """Count a request's verdicts and give them to who waits."""
    results = request.results()
    owner = pool()
    if owner is not None:
        with owner._lock:
            owner._rows.update(judged.verdict.status for judged in results)
            owner._ms.extend(judged.ms for judged in results)
        del owner
    request.future.set_result(results)


def count_restarts(pool: "weakref.ref[WorkerPool]", number: int) -> None:
    """Count workers that were replaced."""
    owner = pool()
    if owner is not None:
        with owner._lock:
            owner._restarts += number


@cache
def supported(platform: str) -> bool:
    """True where this system can hold a worker to limits; warns once where it cannot."""
    if platform != "linux":
        message = f"Workers need Linux; on {platform} rules run in the trainer's process, where no limit holds them."
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return platform == "linux"


def inline(rule: Rule, row: Row) -> Judged:
    """Judge a row in this process; an exception is data, as in a worker."""
    began = time.monotonic()
    try:
        verdict = as_verdict(rule.score(row))
    except Exception as error:  # As in a worker: the caller decides what to do about it.
        verdict = Verdict(None, "error", f"{type(error).__name__}: {error}")
    return Judged(verdict, 1000 * (time.monotonic() - began))

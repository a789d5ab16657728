"""Worker processes for rules that may hang, crash or use too much memory on hostile text.

    trainer  --  fork server  --  worker
                              --  worker

`WorkerPool.run` returns a verdict per row for any completions: a row that exceeds its limits is stopped and gets the
rule's floor, and no other row's verdict depends on it. Statuses that the pool adds:

    timeout      used more processor or wall-clock time than `Limits`; the floor
    too_complex  needed more memory than `Limits`, or nested deeper than Python's stack; the floor
    crashed      ended its worker, or broke its connection; the floor
    error        the rule raised; no value; the detail holds error, place and traceback
    infra_error  no worker could start, or the call's time was over before the row began; no value

On other systems than Linux, rules run in the caller's process without limits, and a warning is given once.
"""

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from trl_ext.rewards.base.rule import Row, Rule, Verdict, as_verdict
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Judged, packed

if TYPE_CHECKING:
    from trl_ext.rewards.isolation.workers.server_thread import ServerThread  # Needs Linux.


class WorkerPool:
    """Judges rows in processes that can be killed; starts them with the first call.

    Any thread may call it, several at a time. It pickles as its limits: a spawned or forked process starts separate
    workers.

    Example:
        with WorkerPool(Limits(cpu_s=1)) as pool:
            verdicts = pool.run([(rule, row) for row in rows])
    """

    _thread: "ServerThread | None"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._reset()

    def run(self, tasks: Iterable[tuple[Rule, Row]]) -> list[Verdict]:
        """Return one verdict per task, in their order. RuleError or DataError if a task cannot be sent to a worker."""
        return [judged.verdict for judged in self.submit(tasks).result()]

    def submit(self, tasks: Iterable[tuple[Rule, Row]]) -> "Future[list[Judged]]":
        """Start `run` and return at once; in an event loop, `await asyncio.wrap_future(pool.submit(tasks))`."""
        tasks = list(tasks)
        future: Future[list[Judged]] = Future()
        future.set_running_or_notify_cancel()  # A sent row cannot be cancelled.
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

    @property
    def restarts(self) -> int:
        """Workers that were replaced, after a stopped row or because a row left a thread, child or memory."""
        return self._counts["restarts"]

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
        self._counts: Counter[str] = Counter()

    def _connected(self) -> "ServerThread":
        """Return the fork server's thread; start it if needed, also in a forked child, which has no threads."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._thread is None or self._thread.closed:
                from trl_ext.rewards.isolation.workers.server_thread import ServerThread

                self._thread = ServerThread(self.limits, self._counts)  # It must not keep the pool alive.
                weakref.finalize(self, self._thread.close)  # Also at the interpreter's end.
            return self._thread


def shared_pool(limits: Limits) -> WorkerPool:
    """Return this process's pool with these limits, which several rule sets share."""
    return _POOLS.setdefault(limits, WorkerPool(limits))  # Atomic; an unused pool has no processes.


_POOLS: dict[Limits, WorkerPool] = {}


@cache
def supported(platform: str) -> bool:
    """Return True if this system can limit workers; warn once if it cannot."""
    if platform != "linux":
        message = f"Workers need Linux; on {platform} rules run in the trainer's process, where no limit holds them."
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return platform == "linux"


def inline(rule: Rule, row: Row) -> Judged:
    """Judge a row in this process; an exception becomes a verdict, as in a worker."""
    began = time.monotonic()
    try:
        verdict = as_verdict(rule.score(row))
    except Exception as error:  # The caller decides what to do about it.
        verdict = Verdict(None, "error", f"{type(error).__name__}: {error}")
    return Judged(verdict, 1000 * (time.monotonic() - began))

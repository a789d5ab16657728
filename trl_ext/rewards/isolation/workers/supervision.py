"""The fork server's workers: starting them, hearing them, charging rows with what becomes of them, leaving nothing.

a row in progress used too much      its worker is killed; the row gets the rule's floor, "timeout"
its worker died or sent junk         the row gets the floor, "crashed"; after a SIGKILL from outside, which may be
                                     the kernel's for want of memory, it is tried once more first
the rest of such a worker's chunk    goes back to the head of the queue, without blame
"""

import json
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.kernel import adopt_orphans, children
from trl_ext.rewards.isolation.workers.breaker import FAILED
from trl_ext.rewards.isolation.workers.confine import kill_group
from trl_ext.rewards.isolation.workers.fork import Task, Worker, ended_sentence, fork_worker
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import wait
from trl_ext.rewards.isolation.workers.worker import DETAIL_CHARS, STARTED, cpu_sentence

# Between two failed starts.
RETRY_S = 0.1
# Between the end of a worker's connection and its own.
HANG_UP_S = 0.05
HANG_UP_TICK_S = 0.005
# A child that forks faster than it is killed is left to the next sweep.
SWEEP_S = 0.2
# What is read of a worker that has ended.
LAST_WORDS_BYTES = 1 << 22
# What reading junk as a report may raise: not JSON, another type, a key less, nested too deep.
JUNK = (ValueError, TypeError, KeyError, RecursionError)


class Workers(ABC):
    """The workers of a server, by process id; one thread, nothing shared."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rules: list[Any] = []
        self.workers: dict[int, Worker] = {}
        self.spared: set[int] = set()  # Children of the rules' own modules.
        self.unswept = False  # Whether rows may have left something running.
        self.retry_at = 0.0
        self.wake, self.bell = socket.socketpair()

    @abstractmethod
    def answer(self, task: Task, value: Any, status: str, detail: str, ms: float, machine: bool = False) -> None:
        """Report a row's verdict; the value "floor" stands for its rule's floor, and `machine` is for the breaker."""

    @abstractmethod
    def put_back(self, tasks: Iterable[Task]) -> None:
        """Queue rows that have to be dealt out again."""

    @abstractmethod
    def failed_start(self, why: str) -> None:
        """Note that a worker did not start, or ended before its first row."""

    @abstractmethod
    def replaced(self) -> None:
        """Note that a worker was killed that another has to replace."""

    @abstractmethod
    def leave(self) -> None:
        """Close in a new worker what only the server may hold."""

    def catch_deaths(self) -> None:
        """Wake the loop when a child ends: a worker's own child may hold the connection open."""
        adopt_orphans()
        self.wake.setblocking(False)
        self.bell.setblocking(False)
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)

    def start(self) -> Worker | None:
        """A new worker, or None when the machine gives none."""
        try:
            worker = fork_worker(self.rules, self.limits, self.leave)
        except OSError as error:
            self.retry_at = time.monotonic() + RETRY_S
            if not self.workers:
                self.failed_start(str(error))
            return None
        self.workers[worker.pid] = worker
        return worker

    def hear_worker(self, worker: Worker) -> None:
        """Take verdicts; a worker that hangs up or sends anything else is killed."""
        if worker.pid not in self.workers:
            return
        worker.stream.flush()
        there = worker.stream.receive()
        try:
            for data in worker.stream.lines():
                self.hear_line(worker, data)
        except JUNK:
            self.crashed(worker, "its worker's connection was tampered with")
            return
        if not there:
            self.hung_up(worker)

    def hung_up(self, worker: Worker) -> None:
        """A connection has closed: the worker ends, which tells more a moment later, or hostile code has closed it."""
        end = time.monotonic() + HANG_UP_S
        while worker.pid in self.workers and time.monotonic() < end:
            self.reap()
            wait([], [self.wake.fileno()], HANG_UP_TICK_S)
        if worker.pid in self.workers:
            self.crashed(worker, "its worker's connection was closed")

    def hear_line(self, worker: Worker, data: bytes) -> None:
        """The start of a chunk, or a verdict, after which the next row begins."""
        if worker.pid not in self.workers:
            raise ValueError("a line after the last")
        if data + b"\n" == STARTED and worker.tasks and not worker.judging:
            worker.begin()
            return
        report = checked(json.loads(data))
        if not worker.judging:
            raise ValueError("a verdict without a row")
        task = worker.tasks.popleft()
        worker.begin()
        if report["retire"]:
            self.retire(worker)
        failed = report["status"] in FAILED
        self.answer(task, report["value"], report["status"], report["detail"], report["ms"], machine=failed)

    def retire(self, worker: Worker) -> None:
        """Kill a worker; its open rows go back."""
        del self.workers[worker.pid]
        worker.kill()
        self.put_back(worker.tasks)
        worker.tasks.clear()
        worker.judging = False
        self.unswept = True
        if worker.num_rules == len(self.rules):  # Else it only makes room for one that knows the new rules.
            self.replaced()

    def charge(self, worker: Worker, status: str, detail: str) -> None:
        """Kill a worker; the row in progress gets the floor."""
        task = worker.tasks.popleft()
        took_s = time.monotonic() - worker.since
        task.batch.stopped_s += took_s
        self.retire(worker)
        self.answer(task, "floor", status, detail, 1000 * took_s)

    def crashed(self, worker: Worker, detail: str) -> None:
        """A worker is lost: charge the row in progress, or count a failed start."""
        if worker.judging:
            self.charge(worker, "crashed", detail)
        else:
            began = bool(worker.tasks)
            self.retire(worker)
            if began:
                self.retry_at = time.monotonic() + RETRY_S
                self.failed_start(detail)

    def watch(self) -> None:
        """Stop rows that overrun and workers that stall."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            over = worker.overrun(self.limits, now)
            if over:
                self.charge(worker, "timeout", over)
            elif worker.stalled(now):
                self.crashed(worker, "it does not begin")

    def reap(self) -> None:
        """Collect ended children."""
        with suppress(BlockingIOError):
            self.wake.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                if pid in self.workers:
                    self.died(self.workers[pid], status, usage.ru_utime + usage.ru_stime)

    def died(self, worker: Worker, status: int, cpu_s: float) -> None:
        """Read the last words of a worker that ended, then charge the row in progress, if there is one."""
        used_s = cpu_s - worker.cpu_since
        self.last_words(worker)
        if worker.pid not in self.workers:
            return
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status)
        if worker.judging and (killed in (signal.SIGPROF, signal.SIGXCPU) or used_s > self.limits.cpu_s):
            self.charge(worker, "timeout", cpu_sentence(self.limits))
        elif worker.judging and killed == signal.SIGKILL and not worker.tasks[0].kills:
            worker.tasks[0].kills += 1
            self.retire(worker)
        else:
            self.crashed(worker, ended_sentence(status))

    def last_words(self, worker: Worker) -> None:
        """Take the verdicts that a worker sent before it ended."""
        while worker.stream.receive() and len(worker.stream.inbox) < LAST_WORDS_BYTES:
            if not wait([worker.stream], [], 0):
                break
        with suppress(*JUNK):
            for data in worker.stream.lines():
                self.hear_line(worker, data)

    def sweep(self) -> None:
        """Kill what rows left running, however they detached it: it has become a child of the server."""
        self.unswept = False
        end = time.monotonic() + SWEEP_S
        while strays := children() - self.workers.keys() - self.spared:
            for pid in strays:
                kill_group_of_stray(pid)
            self.reap()
            if time.monotonic() > end:
                break

    def stop(self) -> None:
        """Kill all workers and what they left."""
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
        self.sweep()


def kill_group_of_stray(pid: int) -> None:
    """Kill a stray, and its group where it leads one."""
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            kill_group(pid)
        else:
            os.kill(pid, signal.SIGKILL)


def checked(report: Any) -> dict[str, Any]:
    """A worker's report, or ValueError when it is not one."""
    value, detail = report["value"], report["detail"]
    if not (value is None or value == "floor" or isinstance(value, float)):
        raise ValueError("no value")
    types = {"status": str, "detail": str, "ms": float, "retire": bool}
    if not all(isinstance(report[key], kind) for key, kind in types.items()):
        raise ValueError("no report")
    return {**report, "status": report["status"][:DETAIL_CHARS], "detail": detail[:DETAIL_CHARS]}

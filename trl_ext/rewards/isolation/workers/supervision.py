"""The fork server's workers: starting them, hearing them, charging rows with what becomes of them, leaving nothing.

a row in progress used too much      its worker is killed; the row gets the rule's floor, "timeout"
its worker died or sent junk         the row gets the floor, "crashed"; after a SIGKILL from outside, which may be
                                     the kernel's for want of memory, it is tried once more first
the rest of such a worker's chunk    goes back to the head of the queue, without blame
a row imported what nobody had yet   the server imports it, too, so that later workers have it from their fork; a row
                                     that did not end well meanwhile is tried again, the first with more time and
                                     memory, the others when that one is done
"""

import json
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.kernel import adopt_orphans, children
from trl_ext.rewards.isolation.workers.breaker import FAILED
from trl_ext.rewards.isolation.workers.confine import kill_group
from trl_ext.rewards.isolation.workers.fork import Task, Worker, ended_sentence, fork_worker
from trl_ext.rewards.isolation.workers.imports import IMPORTING, import_all
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
# Rows of a rule that may have `Limits.patient`. Few: a hostile row that is stopped could have imported something, too.
PATIENT_ROWS = 2
# How a row ends that found too little time or memory to import.
UNFINISHED = ("timeout", "too_complex", "error")
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
        self.known_modules: set[str] = set()  # Those that a row has imported and this process has tried to.
        self.patient_rows: Counter[int] = Counter()  # By rule.
        self.held: dict[int, list[Task]] = {}  # By rule: rows that wait for its patient row.
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
            return
        if data + b"\n" == STARTED and worker.tasks and not worker.judging:
            worker.begin()
            return
        if not worker.judging:
            raise ValueError("a line without a row")
        if data + b"\n" == IMPORTING:
            worker.importing = True
            return
        report = checked(json.loads(data))
        if report["seal"] != f"{worker.seal}{len(worker.tasks)}":
            raise ValueError("a verdict that the worker's own code has not sent")
        task = worker.tasks.popleft()
        self.import_too(report["imported"])
        forgiven = report["status"] in UNFINISHED and self.forgives(worker, task)
        worker.begin()
        if report["retire"] or forgiven:
            self.retire(worker)
        if forgiven:
            self.try_again(task)
            return
        failed = report["status"] in FAILED
        self.answer(task, report["value"], report["status"], report["detail"], report["ms"], machine=failed)

    def import_too(self, names: list[str]) -> None:
        """Import what a row has imported, so that workers forked from now on have it."""
        new = [name for name in names if name not in sys.modules and name not in self.known_modules]
        if not new:
            return
        self.known_modules.update(new)
        before = children()
        import_all(new)
        self.spared |= children() - before

    def forgives(self, worker: Worker, task: Task) -> bool:
        """True where a row that did not end well began to import something, and has not been tried again yet."""
        waits = task.rule in self.held or self.patient_rows[task.rule] < PATIENT_ROWS
        return worker.importing and not task.retried and waits

    def try_again(self, task: Task) -> None:
        """Queue a forgiven row: the first of its rule with patient limits, the others behind that one."""
        task.retried = True
        if task.rule in self.held:
            self.held[task.rule].append(task)
            return
        task.patient = True
        self.patient_rows[task.rule] += 1
        self.held[task.rule] = []
        self.put_back([task])

    def settled(self, task: Task) -> None:
        """Queue the rows that have waited for a patient one; to be called with every row's end."""
        if task.patient:
            self.put_back(self.held.pop(task.rule, ()))

    def limits_of(self, worker: Worker) -> Limits:
        """The limits of the row in progress."""
        return self.limits.patient if worker.tasks and worker.tasks[0].patient else self.limits

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
        """Kill a worker; the row in progress gets the floor, unless it is forgiven."""
        task = worker.tasks.popleft()
        took_s = time.monotonic() - worker.since
        task.batch.stopped_s += took_s
        forgiven = self.forgives(worker, task)
        self.retire(worker)
        if forgiven:
            self.try_again(task)
            return
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
            over = worker.overrun(self.limits_of(worker), now)
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
        used_s, limits = cpu_s - worker.cpu_since, self.limits_of(worker)
        self.last_words(worker)
        if worker.pid not in self.workers:
            return
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status)
        if worker.judging and (killed in (signal.SIGPROF, signal.SIGXCPU) or used_s > limits.cpu_s):
            self.charge(worker, "timeout", cpu_sentence(limits))
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
    if not all(isinstance(name, str) for name in report["imported"]):
        raise ValueError("no names")
    types = {"status": str, "detail": str, "ms": float, "retire": bool}
    if not all(isinstance(report[key], kind) for key, kind in types.items()):
        raise ValueError("no report")
    return {**report, "status": report["status"][:DETAIL_CHARS], "detail": detail[:DETAIL_CHARS]}

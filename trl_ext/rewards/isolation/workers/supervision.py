"""The fork server's workers: start them, read their reports, attribute failures to rows, clean up.

a row used too much time             its worker is killed; the row gets the rule's floor, "timeout"
its worker died or sent junk         the row gets the floor, "crashed"; after a SIGKILL, which the kernel sends when
                                     memory runs out, it is first tried once more
the rest of such a worker's chunk    goes back to the head of the queue
a row imported a new module          the server imports it, too, so that later workers inherit it; a row that failed
                                     during an import is tried again, the first row of a rule with more time and
                                     memory, its others after that row
"""

import json
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.kernel import children
from trl_ext.rewards.isolation.workers.breaker import FAILED
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Stream, line, wait
from trl_ext.rewards.isolation.workers.worker import (
    DETAIL_CHARS,
    IMPORTING,
    STARTED,
    Batch,
    Task,
    Worker,
    cpu_sentence,
    ended_sentence,
    fork_worker,
    import_all,
    kill_group,
)

RETRY_S = 0.1  # between two failed starts
LEAST_FAILURES = 3  # failed starts in a row after which the waiting rows are given up
# Longest time between the end of a worker's connection and the end of the worker.
HANG_UP_S = 0.05
HANG_UP_TICK_S = 0.005
STALL_S = 10.0  # A worker that has a chunk and does not begin is blocked by the remains of an earlier row.
SWEEP_S = 0.2  # The next sweep handles a child that forks faster than it is killed.
LAST_WORDS_BYTES = 1 << 22  # read from a worker that has ended
# Rows of a rule that may have `Limits.patient`. Few: a hostile row could import something, too.
PATIENT_ROWS = 2
# Statuses of a row that had too little time or memory for an import.
UNFINISHED = ("timeout", "too_complex", "error")
# Errors from a report that is junk: not JSON, wrong type, key missing, nested too deep.
JUNK = (ValueError, TypeError, KeyError, RecursionError)


class Workers:
    """The workers of a server, by process id, and the rows that wait for a worker. Used by one thread."""

    def __init__(self, link: Stream, limits: Limits) -> None:
        self.link = link  # To the trainer.
        self.limits = limits
        self.queue: deque[Task] = deque()
        self.batches: dict[int, Batch] = {}
        self.failures = 0  # Starts in a row that failed.
        self.rules: list[Any] = []
        self.workers: dict[int, Worker] = {}
        self.spared: set[int] = set()  # Children of the rules' own modules.
        self.unswept = False  # Whether rows may have left something running.
        self.retry_at = 0.0
        self.known_modules: set[str] = set()  # Imported by a row; this process has tried to import them, too.
        self.patient_rows: Counter[int] = Counter()  # By rule.
        self.held: dict[int, list[Task]] = {}  # By rule: rows that wait for its patient row.
        self.wake, self.bell = socket.socketpair()

    def answer(self, task: Task, value: Any, status: str, detail: str, ms: float = 0.0, machine: bool = False) -> None:
        """Send a verdict to the trainer, and free what waited for its row.

        Args:
            task: The judged row.
            value: Its reward before weight and gate, or None.
            status, detail: As in `Verdict`.
            ms: Time that the rule took, in milliseconds.
            machine: Whether the breaker counts it: the machine failed, not the row.
        """
        verdict = {"value": value, "status": status, "detail": detail, "ms": ms, "machine": machine}
        self.link.post(line({"batch": task.batch.number, "row": task.index, **verdict}))
        self.failures = 0
        if task.patient:  # The rows of its rule that have waited for it.
            self.put_back(self.held.pop(task.rule, ()))
        task.batch.num_open -= 1
        if not task.batch.num_open:
            self.batches.pop(task.batch.number, None)
            self.unswept = True

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Put rows at the head of the queue."""
        self.queue.extendleft(reversed(list(tasks)))

    def failed_start(self, why: str) -> None:
        """Count a worker that did not start, or ended before its first row; after three in a row, give up all rows."""
        self.failures += 1
        if self.failures >= LEAST_FAILURES:
            waiting, self.queue = self.queue, deque()
            for task in waiting:
                self.answer(task, None, "infra_error", f"no worker could be started: {why}", machine=True)

    def leave(self) -> None:
        """Close the server's sockets in a new worker."""
        for sock in (self.link.sock, self.wake, self.bell, *(worker.stream.sock for worker in self.workers.values())):
            sock.close()

    def start(self) -> Worker | None:
        """Return a new worker, or None if the machine cannot start a process."""
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
        """Read verdicts; kill a worker that closes its connection or sends anything else."""
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
        if there:
            return
        # Either the worker is about to end, or hostile code has closed the connection.
        end = time.monotonic() + HANG_UP_S
        while worker.pid in self.workers and time.monotonic() < end:
            self.reap()
            wait([], [self.wake.fileno()], HANG_UP_TICK_S)
        if worker.pid in self.workers:
            self.crashed(worker, "its worker's connection was closed")

    def hear_line(self, worker: Worker, data: bytes) -> None:
        """Handle the start of a chunk, the start of an import, or a verdict, after which the next row begins."""
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
        new = [name for name in report["imported"] if name not in sys.modules and name not in self.known_modules]
        if new:  # Later workers inherit them.
            self.known_modules.update(new)
            before = children()
            import_all(new)
            self.spared |= children() - before
        forgiven = report["status"] in UNFINISHED and self.forgives(worker, task)
        worker.begin()
        if report["retire"] or forgiven:
            self.retire(worker)
        if forgiven:
            self.try_again(task)
            return
        failed = report["status"] in FAILED
        self.answer(task, report["value"], report["status"], report["detail"], report["ms"], machine=failed)

    def forgives(self, worker: Worker, task: Task) -> bool:
        """Return True if a failed row has begun an import and has not been tried again yet."""
        waits = task.rule in self.held or self.patient_rows[task.rule] < PATIENT_ROWS
        return worker.importing and not task.retried and waits

    def try_again(self, task: Task) -> None:
        """Queue a forgiven row: the first of its rule with patient limits, the others after that row."""
        task.retried = True
        if task.rule in self.held:
            self.held[task.rule].append(task)
            return
        task.patient = True
        self.patient_rows[task.rule] += 1
        self.held[task.rule] = []
        self.put_back([task])

    def limits_of(self, worker: Worker) -> Limits:
        return self.limits.patient if worker.tasks and worker.tasks[0].patient else self.limits

    def retire(self, worker: Worker) -> None:
        """Kill a worker and queue its open rows again."""
        del self.workers[worker.pid]
        worker.kill()
        self.put_back(worker.tasks)
        worker.tasks.clear()
        worker.judging = False
        self.unswept = True
        if worker.num_rules == len(self.rules):  # Otherwise a worker with the new rules replaces it.
            self.link.post(line({"restarts": 1}))

    def charge(self, worker: Worker, status: str, detail: str) -> None:
        """Kill a worker; its row in progress gets the floor, unless it is forgiven."""
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
        """Handle the loss of a worker: charge its row in progress, or count a failed start."""
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
            elif worker.tasks and not worker.judging and now - worker.since > STALL_S:
                self.crashed(worker, "it does not begin")

    def reap(self) -> None:
        with suppress(BlockingIOError):
            self.wake.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                if pid in self.workers:
                    self.died(self.workers[pid], status, usage.ru_utime + usage.ru_stime)

    def died(self, worker: Worker, status: int, cpu_s: float) -> None:
        """Read the last reports of a worker that ended, then charge its row in progress, if any."""
        used_s, limits = cpu_s - worker.cpu_since, self.limits_of(worker)
        while worker.stream.receive() and len(worker.stream.inbox) < LAST_WORDS_BYTES:
            if not wait([worker.stream], [], 0):
                break
        with suppress(*JUNK):
            for data in worker.stream.lines():
                self.hear_line(worker, data)
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

    def sweep(self) -> None:
        """Kill processes that rows left running; detached processes have become children of the server."""
        self.unswept = False
        end = time.monotonic() + SWEEP_S
        while strays := children() - self.workers.keys() - self.spared:
            for pid in strays:
                with suppress(ProcessLookupError):
                    if os.getpgid(pid) == pid:
                        kill_group(pid)
                    else:
                        os.kill(pid, signal.SIGKILL)
            self.reap()
            if time.monotonic() > end:
                break


def checked(report: Any) -> dict[str, Any]:
    """Return a worker's report; ValueError if it is not a report."""
    value, detail = report["value"], report["detail"]
    if not (value is None or value == "floor" or isinstance(value, float)):
        raise ValueError("no value")
    if not all(isinstance(name, str) for name in report["imported"]):
        raise ValueError("no names")
    types = {"status": str, "detail": str, "ms": float, "retire": bool}
    if not all(isinstance(report[key], kind) for key, kind in types.items()):
        raise ValueError("no report")
    return {**report, "status": report["status"][:DETAIL_CHARS], "detail": detail[:DETAIL_CHARS]}

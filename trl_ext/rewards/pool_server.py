"""The fork server: loads the rules once, forks workers, deals out rows, and stops what overruns.

It is a process of its own, started as a fresh interpreter: CUDA, tokenizers and threads of the trainer are not in it,
the user's script does not run again, and the trainer's interpreter lock cannot delay a kill. It scores nothing itself.

    a row in progress used too much      its worker is killed; the row gets the rule's floor, "timeout"
    its worker died or sent junk         the row gets the floor, "crashed"; after a SIGKILL from outside, which may be
                                         the kernel's for want of memory, it is tried once more first
    the rest of such a worker's chunk    goes back to the head of the queue, without blame
    workers do not start, three times    the rows that wait get no value, "infra_error"
    the call's time is up                the rows in progress get the floor, "timeout"; those that never began get no
                                         value, "infra_error", which the breaker counts unless stopped rows held the
                                         workers for half of the call's time: that is the model's doing
"""

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from trl_ext.rewards.limits import Limits
from trl_ext.rewards.pool_confine import adopt_orphans, children, kill_group
from trl_ext.rewards.pool_fork import Batch, Task, Worker, ended_sentence, fork_worker
from trl_ext.rewards.pool_wire import Stream, line, load, wait
from trl_ext.rewards.pool_worker import DETAIL_CHARS, STARTED, cpu_sentence

# How late a kill may be that the kernel has not done itself. The check costs a system call per worker.
TICK_S = 0.02
# How late the death of a trainer is noticed that left the connection open in a forked child.
IDLE_TICK_S = 1.0
# Starts in a row that fail before the rows that wait are given up, and the pause between two of them.
LEAST_FAILURES = 3
RETRY_S = 0.1
# Between the end of a worker's connection and its own.
HANG_UP_S = 0.05
# A child that forks faster than it is killed is left to the next sweep.
SWEEP_S = 0.2


class ForkServer:
    """State and loop of the server; one thread, nothing shared."""

    def __init__(self, link: Stream, limits: Limits, trainer: int) -> None:
        self.link = link
        self.limits = limits
        self.trainer = trainer
        self.rules: list[Any] = []
        self.known: dict[bytes, int] = {}  # Pickled rule: its place in `rules`.
        self.queue: deque[Task] = deque()
        self.batches: dict[int, Batch] = {}
        self.workers: dict[int, Worker] = {}
        self.spared: set[int] = set()  # Children of the rules' own modules.
        self.unswept = False  # Whether rows may have left something running.
        self.failures = 0
        self.retry_at = 0.0
        self.wake, self.bell = socket.socketpair()

    def run(self) -> None:
        """Serve until the trainer closes the connection or is gone."""
        self.catch_deaths()
        while os.getppid() == self.trainer:
            self.deal()
            streams = {worker.stream.fileno(): worker for worker in self.workers.values()}
            idle = not self.batches
            ready = wait(
                [self.link, *(worker.stream for worker in streams.values())],
                [self.wake.fileno()],
                IDLE_TICK_S if idle else TICK_S,
            )
            if self.link.fileno() in ready and not self.hear_trainer():
                break
            for number in ready & streams.keys():
                self.hear_worker(streams[number])
            if self.wake.fileno() in ready:
                self.wake.recv(4096)
                self.reap()
            self.watch()
            if idle or self.unswept:
                self.sweep()
            self.link.flush()  # One call for all that a round has brought.
        self.stop()

    def catch_deaths(self) -> None:
        """Wake the loop when a child ends: a worker's own child may hold the connection open."""
        adopt_orphans()
        self.wake.setblocking(False)
        self.bell.setblocking(False)
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)

    def leave(self) -> None:
        """In a new worker: close what only the server may hold."""
        for sock in (self.link.sock, self.wake, self.bell, *(worker.stream.sock for worker in self.workers.values())):
            sock.close()

    # The trainer

    def hear_trainer(self) -> bool:
        """Take new batches; False when the trainer has hung up."""
        there = self.link.receive()
        for data in self.link.frames():
            self.take(load(data))
        return there

    def take(self, message: dict[str, Any]) -> None:
        """Queue a batch, or say why its rules cannot be loaded."""
        sys.path.extend(path for path in message["path"] if path not in sys.path)
        try:
            rules = [self.place(data) for data in message["rules"]]
        except BaseException as error:  # A rule's module may raise anything on import, SystemExit included.
            trace = "".join(traceback.format_exception(error, limit=-3))
            sentence = f"{type(error).__name__}: {str(error)[:DETAIL_CHARS]}\n{trace[-DETAIL_CHARS:]}"
            self.link.post(line({"batch": message["batch"], "error": sentence}))
            return
        batch = Batch(message["batch"], len(message["rows"]), time.monotonic() + self.limits.batch_s)
        self.batches[batch.number] = batch
        self.queue.extend(Task(batch, index, rules[rule], row) for index, rule, row in message["rows"])

    def place(self, data: bytes) -> int:
        """The place of a rule among those loaded; loads it when it is new."""
        if data not in self.known:
            rule = load(data)
            getattr(rule, "warm_up", lambda: None)()
            self.known[data] = len(self.rules)
            self.rules.append(rule)
            self.spared = children() - self.workers.keys()
            gc.collect()
            gc.freeze()  # Forks share what is loaded as long as no collection touches it.
        return self.known[data]

    def answer(self, task: Task, value: Any, status: str, detail: str, ms: float = 0.0, machine: bool = False) -> None:
        """Send a verdict; `machine` says that the breaker counts it."""
        self.link.post(
            line(
                {
                    "batch": task.batch.number,
                    "row": task.index,
                    "value": value,
                    "status": status,
                    "detail": detail,
                    "ms": ms,
                    "machine": machine,
                }
            )
        )
        task.batch.num_open -= 1
        if not task.batch.num_open:
            self.batches.pop(task.batch.number, None)
            self.unswept = True

    # Workers

    def deal(self) -> None:
        """Give chunks to idle workers, and start workers while there are rows for more."""
        while self.queue:
            idle = next((worker for worker in self.workers.values() if not worker.tasks), None)
            if idle is not None and idle.num_rules < len(self.rules):
                self.retire(idle)
                continue
            if idle is None:
                if len(self.workers) >= self.limits.num_workers or time.monotonic() < self.retry_at:
                    return
                idle = self.start()
                if idle is None:
                    continue
            idle.assign(self.next_chunk())

    def next_chunk(self) -> list[Task]:
        """Rows of one batch from the queue's head; fewer towards its end, so that no worker is left with many."""
        share = -(-len(self.queue) // (2 * self.limits.num_workers))
        batch = self.queue[0].batch
        chunk = [self.queue.popleft()]
        while self.queue and self.queue[0].batch is batch and len(chunk) < min(self.limits.chunk, share):
            chunk.append(self.queue.popleft())
        return chunk

    def start(self) -> Worker | None:
        """A new worker, or None when the machine gives none."""
        try:
            worker = fork_worker(self.rules, self.limits, self.leave)
        except OSError as error:
            self.failed_start(str(error))
            return None
        self.workers[worker.pid] = worker
        return worker

    def failed_start(self, why: str) -> None:
        """Count a start that failed; after a few in a row, give up the rows that wait."""
        self.failures += 1
        self.retry_at = time.monotonic() + RETRY_S
        if self.failures >= LEAST_FAILURES:
            self.failures = 0
            waiting, self.queue = self.queue, deque()
            for task in waiting:
                self.answer(task, None, "infra_error", f"no worker could be started: {why}", machine=True)

    def hear_worker(self, worker: Worker) -> None:
        """Take verdicts; a worker that hangs up or sends anything else is killed."""
        if worker.pid not in self.workers:
            return
        worker.stream.flush()
        there = worker.stream.receive()
        try:
            for data in worker.stream.lines():
                self.hear_line(worker, data)
        except (ValueError, TypeError, KeyError):
            self.crashed(worker, "its worker's connection was tampered with")
            return
        if not there:
            self.hung_up(worker)

    def hung_up(self, worker: Worker) -> None:
        """A connection has closed: the worker ends, which tells more a moment later, or hostile code has closed it."""
        end = time.monotonic() + HANG_UP_S
        while worker.pid in self.workers and time.monotonic() < end:
            self.reap()
            wait([], [self.wake.fileno()], TICK_S / 4)
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
        self.failures = 0
        task = worker.tasks.popleft()
        worker.begin()
        if report["retire"]:
            self.retire(worker)
        self.answer(task, report["value"], report["status"], report["detail"], report["ms"])

    def retire(self, worker: Worker) -> None:
        """Kill a worker; its open rows go back to the head of the queue."""
        del self.workers[worker.pid]
        worker.kill()
        self.queue.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        worker.judging = False
        self.unswept = True
        if worker.num_rules == len(self.rules):  # Else it only makes room for one that knows the new rules.
            self.link.post(line({"restarts": 1}))

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
                self.failed_start(detail)

    # Watching

    def reap(self) -> bool:
        """Collect ended children; whether one was a worker."""
        found = False
        with suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.workers:
                    self.died(self.workers[pid], status, usage.ru_utime + usage.ru_stime)
                    found = True
        return found

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
        while worker.stream.receive() and len(worker.stream.inbox) < (1 << 22):
            if not wait([worker.stream], [], 0):
                break
        with suppress(ValueError, TypeError, KeyError):
            for data in worker.stream.lines():
                self.hear_line(worker, data)

    def watch(self) -> None:
        """Stop rows that overrun, workers that stall, and calls whose time is up."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            over = worker.overrun(self.limits, now)
            if over:
                self.charge(worker, "timeout", over)
            elif worker.stalled(now):
                self.crashed(worker, "it does not begin")
        for batch in [batch for batch in self.batches.values() if now > batch.deadline]:
            self.expire(batch)

    def expire(self, batch: Batch) -> None:
        """Give up a call: rows in progress get the floor, rows that never began get nothing."""
        ended = f"the call's {self.limits.batch_s:g} s were over"
        for worker in [worker for worker in self.workers.values() if worker.tasks and worker.tasks[0].batch is batch]:
            if worker.judging:
                self.charge(worker, "timeout", f"{ended} while it was judged")
            else:
                self.retire(worker)
        waiting = [task for task in self.queue if task.batch is batch]
        self.queue = deque(task for task in self.queue if task.batch is not batch)
        share = batch.stopped_s / (self.limits.num_workers * self.limits.batch_s)
        for task in waiting:
            detail = f"{ended} before it began; rows that were stopped held the workers for {share:.0%} of them"
            self.answer(task, None, "infra_error", detail, machine=share < 0.5)

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
    value = report["value"]
    if not (value is None or value == "floor" or (isinstance(value, float))):
        raise ValueError("no value")
    if not (isinstance(report["status"], str) and isinstance(report["detail"], str)):
        raise ValueError("no status")
    if not (isinstance(report["ms"], float) and isinstance(report["retire"], bool)):
        raise ValueError("no time")
    return dict(report)


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve the trainer that started this process."""
    settings = json.loads(arguments[0])
    link = Stream(socket.socket(fileno=settings["socket"]))
    ForkServer(link, Limits(**settings["limits"]), settings["trainer"]).run()
    os._exit(0)  # Whatever the rules' modules left for the interpreter's end may hang.

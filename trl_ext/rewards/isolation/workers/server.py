"""The fork server: loads the rules once, forks workers, distributes rows, and stops rows that exceed their limits.

It is a fresh interpreter in a separate process: it holds no CUDA, tokenizers or threads of the trainer, does not run
the user's script again, and the trainer's interpreter lock cannot delay a kill. It scores nothing.

    workers fail to start three times    the waiting rows get no value, "infra_error"
    the call's time is over              the rows in progress get the floor, "timeout"; rows that never began get no
                                         value, "infra_error", which the breaker counts unless stopped rows held the
                                         workers for half of the call's time: then the model is the cause

Failures of single rows are handled in `supervision`.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from trl_ext.rewards.isolation.kernel import adopt_orphans, children
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.supervision import Workers
from trl_ext.rewards.isolation.workers.wire import Stream, line, load, wait
from trl_ext.rewards.isolation.workers.worker import DETAIL_CHARS, Batch, Task, freeze

# Longest delay of a kill by the server. The check costs a system call per worker.
TICK_S = 0.02
# Longest time until the server notices a dead trainer whose forked child holds the connection open.
IDLE_TICK_S = 1.0


class ForkServer(Workers):
    """The server's loop, its queue and its side of the connection to the trainer."""

    def __init__(self, link: Stream, limits: Limits, trainer: int) -> None:
        super().__init__(link, limits)
        self.trainer = trainer
        self.known: dict[bytes, int] = {}  # Pickled rule: its index in `rules`.

    def run(self) -> None:
        """Serve until the trainer closes the connection or ends."""
        adopt_orphans()
        # A child's end wakes the loop, because a worker's child may hold the connection open.
        self.wake.setblocking(False)
        self.bell.setblocking(False)
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        while os.getppid() == self.trainer:
            self.deal()
            streams = {worker.stream.fileno(): worker for worker in self.workers.values()}
            idle = not self.batches
            ready = wait(
                [self.link, *(worker.stream for worker in streams.values())],
                [self.wake.fileno()],
                IDLE_TICK_S if idle else TICK_S,
            )
            if self.link.fileno() in ready:
                there = self.link.receive()
                for data in self.link.frames():
                    self.take(load(data))
                if not there:  # The trainer has closed the connection.
                    break
            for number in ready & streams.keys():
                self.hear_worker(streams[number])
            if self.wake.fileno() in ready:
                self.reap()
            self.watch()
            now = time.monotonic()
            for batch in [batch for batch in self.batches.values() if now > batch.deadline]:
                self.give_up(batch)
            if idle or self.unswept:
                self.sweep()
            self.link.flush()  # One call for all reports of a round.
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
        self.sweep()

    def take(self, message: dict[str, Any]) -> None:
        """Queue a batch, or report why its rules cannot be loaded."""
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
        """Return the index of a rule; load it if it is new."""
        if data not in self.known:
            before = children()
            rule = load(data)
            getattr(rule, "warm_up", lambda: None)()  # Optional: does the imports of `score` once for all workers.
            self.spared |= children() - before
            self.known[data] = len(self.rules)
            self.rules.append(rule)
            freeze()
        return self.known[data]

    def deal(self) -> None:
        """Send chunks to idle workers, and start workers while rows wait."""
        if self.held:
            # Rows of a rule with a patient row in progress would fail as that row did.
            queue, self.queue = self.queue, deque()
            for task in queue:
                (self.queue if task.patient else self.held.get(task.rule, self.queue)).append(task)
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
                    return
            # Rows of one batch; fewer towards the queue's end, so that no worker gets many at last.
            share = -(-len(self.queue) // (2 * self.limits.num_workers))
            chunk = [self.queue.popleft()]
            most = 1 if chunk[0].patient else min(self.limits.chunk, share)
            while self.queue and len(chunk) < most and not self.queue[0].patient:
                if self.queue[0].batch is not chunk[0].batch:
                    break
                chunk.append(self.queue.popleft())
            idle.assign(chunk)

    def give_up(self, batch: Batch) -> None:
        """End a call: rows in progress get the floor, rows that never began get no value."""
        ended = f"the call's {self.limits.batch_s:g} s were over"
        for worker in [worker for worker in self.workers.values() if worker.tasks and worker.tasks[0].batch is batch]:
            if worker.judging:
                self.charge(worker, "timeout", f"{ended} while it was judged")
            else:
                self.retire(worker)
        waiting = [task for tasks in (self.queue, *self.held.values()) for task in tasks if task.batch is batch]
        self.queue = deque(task for task in self.queue if task.batch is not batch)
        for rule, tasks in self.held.items():
            self.held[rule] = [task for task in tasks if task.batch is not batch]
        share = batch.stopped_s / (self.limits.num_workers * self.limits.batch_s)
        for task in waiting:
            detail = f"{ended} before it began; rows that were stopped held the workers for {share:.0%} of them"
            self.answer(task, None, "infra_error", detail, machine=share < 0.5)


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve the trainer that started this process."""
    settings = json.loads(arguments[0])
    link = Stream(socket.socket(fileno=settings["socket"]))
    ForkServer(link, Limits(**settings["limits"]), settings["trainer"]).run()
    os._exit(0)  # Exit functions of the rules' modules may hang.

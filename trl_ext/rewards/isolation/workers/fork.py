"""A worker as the fork server sees it: started by fork, given a chunk, watched row by row, killed."""

import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_ext.rewards.isolation.kernel import cpu_seconds
from trl_ext.rewards.isolation.workers.confine import kill_group, waited_seconds
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Stream, frame
from trl_ext.rewards.isolation.workers.worker import cpu_sentence, serve


@dataclass(slots=True, eq=False)
class Batch:
    """A call's rows: which are open, when the call is given up, how long stopped rows have held workers."""

    number: int
    num_open: int
    deadline: float
    stopped_s: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """A row to judge: its place in the batch, its rule's place among the server's rules, the row as a pickle."""

    batch: Batch
    index: int
    rule: int
    row: bytes
    kills: int = 0  # Times that it was in progress when something other than the pool killed its worker.
    retried: bool = False  # It did not end well while it imported something, and has been queued again.
    patient: bool = False  # It has `Limits.patient`, and a chunk of its own.


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process; `tasks` is its chunk less what is judged, its first task is in progress when `judging`."""

    pid: int
    stream: Stream
    num_rules: int  # Rules that it knows: those that were loaded when it was forked.
    tasks: deque[Task] = field(default_factory=deque)
    seal: str = ""  # What reports on its chunk begin their seal with; a rule that writes to the connection lacks it.
    judging: bool = False
    importing: bool = False  # The row in progress has begun to import a module.
    since: float = 0.0  # When the row in progress began, or the chunk was sent (monotonic clock).
    cpu_since: float = 0.0  # The worker's processor time then.
    waited_since: float | None = None  # Its time in the run queue then; read only for rows that take long.

    def assign(self, tasks: Iterable[Task]) -> None:
        """Send a chunk."""
        self.tasks.extend(tasks)
        self.since = time.monotonic()
        self.seal = secrets.token_hex(8)
        self.stream.send(frame((self.seal, [(task.rule, task.row, task.patient) for task in self.tasks])))

    def begin(self) -> None:
        """The first of the open tasks begins now, if there is one."""
        self.judging, self.importing = bool(self.tasks), False
        self.since, self.cpu_since, self.waited_since = time.monotonic(), cpu_seconds(self.pid), None

    def overrun(self, limits: Limits, now: float) -> str | None:
        """The sentence for what the row in progress has used too much of; None where it is within its limits."""
        if not self.judging:
            return None
        if cpu_seconds(self.pid) - self.cpu_since > limits.cpu_s:
            return cpu_sentence(limits)
        if self.waited_since is None:
            self.waited_since = waited_seconds(self.pid)
        spare_s = now - self.since - limits.row_wall_s
        # Time in which it was ready to run, and the machine had no processor for it, does not count.
        if spare_s > 0 and spare_s > waited_seconds(self.pid) - self.waited_since:
            return f"took more than {limits.row_wall_s:g} s"
        return None

    def kill(self) -> None:
        """End it and its process group, and forget the connection."""
        kill_group(self.pid)
        self.stream.sock.close()


def fork_worker(rules: Sequence[Any], limits: Limits, leave_server: Callable[[], None]) -> Worker:
    """A new worker that knows `rules`; in it, `leave_server` closes what only the server may hold. May raise OSError.

    The server runs one thread and never scores, so that its forks are clean whatever the trainer's process is in.
    """
    server = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            leave_server()
            ours.close()
            serve(theirs, rules, limits, server)
        finally:  # Nothing may return into the server's loop.
            os._exit(1)
    theirs.close()
    return Worker(pid, Stream(ours), len(rules))


def ended_sentence(status: int) -> str:
    """The sentence for how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in set(signal.Signals)
        return f"its worker was killed by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"its worker exited with code {os.WEXITSTATUS(status)}"

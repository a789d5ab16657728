"""A worker in the fork server: fork it, send it a chunk, watch its rows, kill it."""

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
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Stream, frame
from trl_ext.rewards.isolation.workers.worker import cpu_sentence, kill_group, serve, waited_seconds


@dataclass(slots=True, eq=False)
class Batch:
    """A call: its number of open rows, its deadline, and the seconds for which stopped rows have held workers."""

    number: int
    num_open: int
    deadline: float
    stopped_s: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """A row to judge: its index in the batch, the index of its rule, the row as a pickle."""

    batch: Batch
    index: int
    rule: int
    row: bytes
    kills: int = 0  # Times that its worker was killed, not by the pool, while it was in progress.
    retried: bool = False  # It failed during an import and has been queued again.
    patient: bool = False  # It has `Limits.patient` and a separate chunk.


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process; `tasks` is the rest of its chunk, whose first task is in progress if `judging`."""

    pid: int
    stream: Stream
    num_rules: int  # Rules that were loaded when it was forked.
    tasks: deque[Task] = field(default_factory=deque)
    seal: str = ""  # Begins the seals of reports on its chunk; a rule that writes to the connection does not have it.
    judging: bool = False
    importing: bool = False  # The row in progress has begun to import a module.
    since: float = 0.0  # Start of the row in progress, or of sending the chunk (monotonic clock).
    cpu_since: float = 0.0  # The worker's processor time at that moment.
    waited_since: float | None = None  # Its time in the run queue, first read once a row takes long.

    def assign(self, tasks: Iterable[Task]) -> None:
        """Send a chunk."""
        self.tasks.extend(tasks)
        self.since = time.monotonic()
        self.seal = secrets.token_hex(8)
        self.stream.send(frame((self.seal, [(task.rule, task.row, task.patient) for task in self.tasks])))

    def begin(self) -> None:
        """Start the clocks of the first open task, if any."""
        self.judging, self.importing = bool(self.tasks), False
        self.since, self.cpu_since, self.waited_since = time.monotonic(), cpu_seconds(self.pid), None

    def overrun(self, limits: Limits, now: float) -> str | None:
        """Return a message if the row in progress has exceeded its limits, else None."""
        if not self.judging:
            return None
        if cpu_seconds(self.pid) - self.cpu_since > limits.cpu_s:
            return cpu_sentence(limits)
        if self.waited_since is None:
            self.waited_since = waited_seconds(self.pid)
        spare_s = now - self.since - limits.row_wall_s
        # Time in which it waited for a processor does not count.
        if spare_s > 0 and spare_s > waited_seconds(self.pid) - self.waited_since:
            return f"took more than {limits.row_wall_s:g} s"
        return None

    def kill(self) -> None:
        """Kill it and its process group, and close the connection."""
        kill_group(self.pid)
        self.stream.sock.close()


def fork_worker(rules: Sequence[Any], limits: Limits, leave_server: Callable[[], None]) -> Worker:
    """Return a new worker with `rules`, which calls `leave_server` to close the server's sockets. May raise OSError.

    The server has one thread and never scores, so its forks are clean whatever the trainer's process does.
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
    """Return a message of how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in set(signal.Signals)
        return f"its worker was killed by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"its worker exited with code {os.WEXITSTATUS(status)}"

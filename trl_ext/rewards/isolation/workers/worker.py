"""A worker: its limits in the kernel, its loop, which judges rows and reports each, and the fork server's side of it.

The process is a fork of the fork server, so rules and their libraries are loaded. It exits after a row that left a
thread, a child process or much used memory. An import by a row is repeated in the fork server, so each happens once.
"""

import gc
import importlib
import os
import resource
import secrets
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trl_ext.rewards.base.rule import as_verdict, place_of
from trl_ext.rewards.isolation.kernel import cpu_seconds, die_first, die_with_parent
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import LENGTH, Stream, frame, line, load

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# RLIMIT_CPU counts whole seconds; it is the backstop of the fork server's watch.
CPU_SLACK_S = 2


def address_space_bytes() -> int:
    """Return the address space of this process in bytes."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * PAGE_BYTES


def lower(kind: int, value: int) -> None:
    """Set a soft limit, at most the hard limit of the user's shell or cluster."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def num_threads() -> int:
    """Return the number of threads of this process, including threads that Python did not start."""
    return os.stat("/proc/self/task").st_nlink - 2


def has_children() -> bool:
    """Return True if this process has children, running or not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def waited_seconds(pid: int) -> float:
    """Return the seconds that a process's threads waited for a processor; 0.0 if the kernel keeps no record."""
    waited_ns = 0
    for record in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # The thread has just ended.
            waited_ns += int(record.read_bytes().split()[1])
    return waited_ns / 1e9


def kill_group(pid: int) -> None:
    """Kill a worker and its process group at once, so that a child that forks cannot escape."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


# The line that a worker sends when the row in progress begins to import a module.
IMPORTING = line("importing")
LONGEST_NAMES = 2**15  # characters of a report's names of modules


class ImportWatch:
    """A finder that finds nothing, and reports a row's first import to the server before it begins."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.begin()

    def begin(self) -> None:
        """Record the number of loaded modules before a row."""
        self.told = False
        self.num_before = len(sys.modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Report the first import. Python calls this for each new module; None leaves it to the other finders."""
        if not self.told:
            self.told = True
            self.sock.sendall(IMPORTING)

    def imported(self) -> list[str]:
        """Return the modules that the row has loaded, in order, as many as fit into a report."""
        names, length = list(sys.modules)[self.num_before :] if self.told else [], 0
        for number, name in enumerate(names):
            length += len(name)
            if length > LONGEST_NAMES:
                return names[:number]
        return names


def import_all(names: Iterable[str]) -> None:
    """Import modules into this process, which forks workers; ignore their exceptions."""
    for name in names:
        with suppress(BaseException):  # The row that needs the module reports the error.
            importlib.import_module(name)
    freeze()


def freeze() -> None:
    """Exclude loaded objects from garbage collection, so that forks share their memory."""
    gc.collect()
    gc.freeze()


MIB = 2**20
# A worker that has kept this share of a row's memory is replaced, so that later rows have enough.
KEPT_FRAC = 0.25
DETAIL_CHARS = 4000
STARTED = line("started")  # sent when a chunk is read and its first row begins


def serve(sock: socket.socket, rules: Sequence[Any], limits: Limits, parent: int) -> NoReturn:
    """Judge chunks until the server closes the connection.

    Args:
        sock: Connection to the server of the workers.
        rules: Rules by their index in a task.
        limits: Time and memory of a row.
        parent: Process id of the server, with which this process ends.
    """
    os.setsid()  # The process leads a session, so that a signal to its group reaches its forks.
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_first()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # Hostile text must not fill a run's log.
        os.dup2(null, number)
    signal.set_wakeup_fd(-1)
    for unhandled in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
        signal.signal(unhandled, signal.SIG_DFL)
    sock.setblocking(True)
    first_bytes = address_space_bytes()
    kept_bytes = int(KEPT_FRAC * limits.memory_mib * MIB)
    watch = ImportWatch(sock)
    sys.meta_path.insert(0, watch)
    while True:
        seal, tasks = load(exactly(sock, LENGTH.unpack(exactly(sock, LENGTH.size))[0]))
        chunk = [(rules[rule], loaded(row), patient) for rule, row, patient in tasks]
        bytes_now = address_space_bytes()
        sock.sendall(STARTED)
        for number, (rule, row, patient) in enumerate(chunk):
            bounds = limits.patient if patient else limits
            lower(resource.RLIMIT_CPU, int(time.process_time() + bounds.cpu_s) + CPU_SLACK_S)
            lower(resource.RLIMIT_AS, bytes_now + bounds.memory_mib * MIB)
            watch.begin()
            report = judged(rule, row, bounds) | {"imported": watch.imported()}
            report["seal"] = f"{seal}{len(chunk) - number}"
            bytes_now = address_space_bytes()
            # The next row would be charged for the remains of this row.
            report["retire"] = num_threads() > 1 or has_children() or bytes_now - first_bytes > kept_bytes
            sock.sendall(line(report))
            if report["retire"]:
                os._exit(0)


def exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes from the connection; exit if it closes."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), MIB))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def loaded(row: bytes) -> Any:
    """Return the row, or the exception from loading it."""
    try:
        return load(row)
    except Exception as error:  # A pickle may raise anything: it runs constructors of the dataset's types.
        return error


def judged(rule: Any, row: Any, limits: Limits) -> dict[str, Any]:
    """Return the verdict on a row as a message; the value "floor" means the rule's floor."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # An alarm of the last row.
    began, cpu_began = time.monotonic(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # The kernel ends the process, to its clock's tick.
    value, status, detail = verdict_of(rule, row, limits)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - cpu_began > limits.cpu_s and status != "error":
        value, status, detail = "floor", "timeout", cpu_sentence(limits)
    milliseconds = 1000 * (time.monotonic() - began)
    return {"value": value, "status": status, "detail": detail[:DETAIL_CHARS], "ms": milliseconds}


class RowOutcome(NamedTuple):
    """A row's verdict; the value is a number, None, or "floor" for the rule's floor."""

    value: Any
    status: str
    detail: str


def verdict_of(rule: Any, row: Any, limits: Limits) -> RowOutcome:
    """Judge a row.

    The completion causes a full stack, full memory or an exit; the rule causes any other exception.
    """
    try:
        if isinstance(row, Exception):
            raise row
        verdict = as_verdict(rule.score(row))
        return RowOutcome(verdict.value, str(verdict.status), str(verdict.detail))
    except MemoryError:
        return RowOutcome("floor", "too_complex", f"needed more than {limits.memory_mib} MiB of memory")
    except RecursionError:
        return RowOutcome("floor", "too_complex", "nested deeper than Python's stack")
    except Exception as error:  # The caller decides what to do about it.
        try:
            # Type, message and place on the first line, then the traceback.
            trace = "".join(traceback.format_exception(error, limit=-20))
            return RowOutcome(
                None, "error", f"{type(error).__name__}: {str(error)[:500]} ({place_of(error)})\n{trace}"
            )
        except Exception:  # The error's __str__ raises.
            return RowOutcome(None, "error", f"{type(error).__name__}, which cannot be shown")
    except BaseException as error:
        return RowOutcome("floor", "crashed", f"{type(error).__name__} was raised")


def cpu_sentence(limits: Limits) -> str:
    return f"used more than {limits.cpu_s:g} s of processor time"


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

"""Run model-written Python confined, from any process and thread of a training run.

    level  protection
    0      limits on processor time, memory, files; empty environment; a clean interpreter; a temporary folder
    1      also a system call filter (seccomp), only Python's files are readable (Landlock), no new privileges
    2      also separate users, processes, network, mounts and shared memory (namespaces)

The first job tries which level works, logs it, and keeps it. Jobs run in forks of a server process (`server`), one job
at a time in each server. At most one job per spare processor computes; if a job sleeps, the next begins. Needs Linux
5.3 or later; level 1 needs 5.13.
"""

import atexit
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.rewards.isolation.workers.limits import default_workers

_START_S = 30.0
# Wall-clock limit per second of processor time. Time in which a program waits for a processor does not count.
WALL_PER_CPU = 5.0
# How much longer than its job a server may take before it counts as lost. Long, for a machine with ten times the load.
_GRACE_S, _CROWDED = 10.0, 10
# Without the package's `__init__`, which imports packages outside the standard library.
_START = """
import sys, types
root = sys.argv.pop(1)
for name, path in (("trl_ext", root), ("trl_ext.rewards", root + "/rewards")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from trl_ext.rewards.isolation.sandbox.server import main
main()
"""


class SandboxTrouble(OSError):
    """The machine could not run a job; the code in it is not the cause."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Bounds of each process of a job."""

    cpu_s: float
    memory_mib: int
    output_bytes: int
    site: str = ""  # NumPy's folder, for programs that may import it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job.

    `ended`: "exit", "cpu" or "wall" for a time limit, "output" for the output limit, or "lost" if the job ended its
    server twice, which is possible only at level 0.
    """

    ended: str
    code: int = 0
    cpu_s: float = 0.0
    output: bytes = b""
    note: str = ""  # the code's exception, at most 300 bytes


class ServerProcess:
    """A server process and the socket to it. One thread at a time."""

    def __init__(self, at_most: int, site: str) -> None:
        self.kind, self.owner = (at_most, site), os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = _start(theirs.fileno(), at_most, site)
        hello = self._receive(_START_S)
        self.level, self.trouble = int(hello["level"]), str(hello["trouble"])
        self.folder = str(hello["folder"])
        self.lost = ""  # why it has stopped

    def run(self, roles: Any, contents: Sequence[bytes], limits: JobLimits, on_sleep: Callable[[], None]) -> Outcome:
        """Do one job. ConnectionError if the server is gone, SandboxTrouble if the machine cannot run it.

        Sends six descriptors: two contents, the pipes for output and note, and the ends of a channel.

        Args:
            roles: Pairs of a role's name and the places, among the job's six descriptors, that its process gets as 0,
                1, 2, ...
            contents: The two files that the job reads.
            limits: Time, memory and output of the job.
            on_sleep: Called when the job sleeps, so that another job may compute.
        """
        wall_s = limits.cpu_s * WALL_PER_CPU
        job = {"roles": roles, "cpu_s": limits.cpu_s, "wall_s": wall_s, "memory_mib": limits.memory_mib}
        kept, given = list[int](), list[int]()
        try:
            for content in contents:  # Each in a file without a name, open at its start.
                given.append(os.memfd_create("job"))
                with open(given[-1], "wb", closefd=False) as file:
                    file.write(content)
                os.lseek(given[-1], 0, os.SEEK_SET)
            for reading, writing in (os.pipe(), os.pipe()):
                kept.append(reading)
                given.append(writing)
            given += [side.detach() for side in socket.socketpair()]
            socket.send_fds(self.control, [json.dumps(job).encode()], given)
            while given:
                os.close(given.pop())
            return self._follow(kept, limits.output_bytes, time.monotonic() + _CROWDED * wall_s + _GRACE_S, on_sleep)
        finally:
            for number in kept + given:
                os.close(number)

    def _follow(self, kept: Sequence[int], most: int, deadline: float, on_sleep: Callable[[], Any]) -> Outcome:
        """Collect output until the reply, and return both.

        Args:
            kept: Reading ends of the pipes for output and note.
            most: Bytes of output; more end the job.
            deadline: Time by `time.monotonic` at which a silent server counts as gone.
            on_sleep: Called when the job sleeps.
        """
        reading, note = kept
        output, reply, flooded = bytearray(), None, False
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(reading, select.POLLIN)
        while reply is None:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise ConnectionError("no reply in time")
            if reading in ready and not _read_some(reading, output):
                poll.unregister(reading)
            if len(output) > most and not flooded:
                flooded = True
                poll.unregister(reading)
                self.control.send(b'{"stop": 1}')
            if self.control.fileno() in ready:
                reply = self._receive(_GRACE_S)
                if "sleeps" in reply:
                    on_sleep()
                    reply = None
        _read_rest(reading, output, most)
        words = bytearray()
        _read_rest(note, words, 0)
        if flooded or len(output) > most:
            reply["ended"] = "output"
        if reply["ended"] == "trouble":
            raise SandboxTrouble(f"The sandbox cannot shut in its {reply['trouble']}.")
        note_text = words[:300].decode(errors="replace")
        return Outcome(reply["ended"], reply["codes"][-1], max(reply["cpu_s"]), bytes(output), note_text)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self.control.settimeout(timeout_s)
        try:
            message = self.control.recv(2**16)
        except TimeoutError as error:
            raise ConnectionError("no reply in time") from error
        if not message:
            raise ConnectionError("its socket is closed")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def close(self) -> None:
        self.control.close()
        if self.owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.0 if self.lost else 1.0)
            self.process.kill()
            self.process.wait()
            if self.folder:  # The server removes it, unless it was killed.
                shutil.rmtree(self.folder, ignore_errors=True)


def _start(control: int, at_most: int, site: str) -> subprocess.Popen[bytes]:
    """Start a clean interpreter: no site packages, no user settings, only the socket inherited."""
    # The hash seed sets the order of sets of text: same code, same verdict.
    # NumPy's threads would use address space of each program, and keep the server out of its namespaces.
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= {key: os.environ[key] for key in ["LD_LIBRARY_PATH"] if key in os.environ}
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _START, root]
    command += [str(control), str(at_most), site]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        pass_fds=[control],
        start_new_session=True,
    )


def _read_some(reading: int, output: bytearray) -> bool:
    """Read from a pipe; False at its end, or if a pipe that does not block is empty."""
    try:
        part = os.read(reading, 2**16)
    except BlockingIOError:
        return False
    output += part
    return bool(part)


def _read_rest(reading: int, output: bytearray, most: int) -> None:
    """Read the rest of a pipe without writers, up to a little more than `most` bytes."""
    os.set_blocking(reading, False)
    while len(output) <= most and _read_some(reading, output):
        pass


_LOG = logging.getLogger(__name__)
HIGHEST_LEVEL = 2
# Jobs at a time, all but `default_workers()` of them asleep. Each takes four descriptors and up to its memory limit.
MOST_JOBS = max(default_workers(), min(64, 8 * (default_workers() + 1)))


def run_program(source: bytes, stdin: bytes, limits: JobLimits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run a script on an input; the output is its standard output.

    Args:
        source: Python source.
        stdin: Its standard input.
        limits: Time, memory and output of the job.
        at_most: Highest level of isolation to use.
    """
    return _run([("program", (0, 1, 2, 3))], [source, stdin], limits, at_most)


def run_tests(source: bytes, job: bytes, limits: JobLimits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run tests against code; the output is the judge's report.

    Args:
        source: Python source of the code under test.
        job: The tests, as JSON for `roles.run_judge`.
        limits: Time, memory and output of the job.
        at_most: Highest level of isolation to use.
    """
    roles = [("candidate", (0, 4, 3)), ("judge", (1, 5, 2))]
    return _run(roles, [source, job], limits, at_most)


def sandbox_level(at_most: int = HIGHEST_LEVEL, site: str = "") -> tuple[int, str]:
    """Return this machine's level and why the next level fails. Starts a server on the first call."""
    with _computing, _borrow(at_most, site) as server:
        return server.level, server.trouble


def _run(roles: Any, contents: Sequence[bytes], limits: JobLimits, at_most: int) -> Outcome:
    """Run a job on a free server, and once again on a new server if the first fails in the middle.

    Raises SandboxTrouble if both fail.

    Args:
        roles: Pairs of a role's name and the places, among the job's six descriptors, that its process gets as 0, 1,
            2, ...
        contents: The two files that the job reads.
        limits: Time, memory and output of the job.
        at_most: Highest level of isolation to use.
    """
    for _ in range(2):
        with ExitStack() as turn:
            turn.enter_context(_computing)
            with _borrow(at_most, limits.site) as server:
                try:
                    return server.run(roles, contents, limits, on_sleep=turn.close)
                except ConnectionError as error:
                    server.lost = str(error)
                    _LOG.warning("A sandbox server failed in the middle of a job: %s", error)
    if server.level > 0:
        raise SandboxTrouble(f"The sandbox's server failed twice: {server.lost}.")
    return Outcome("lost")  # At level 0 a program can end its server, and must not gain by it.


@contextmanager
def _borrow(at_most: int, site: str) -> Iterator[ServerProcess]:
    """Take an idle server, or start a server; give it back unless it is lost or the job raised."""
    server = _take(at_most, site)
    try:
        yield server
    except BaseException:
        server.close()
        raise
    if server.lost:
        server.close()
    else:
        _idle.append(server)


_idle: list[ServerProcess] = []
_lock = threading.Lock()
_computing = threading.Semaphore(default_workers())
_logged = False


def _take(at_most: int, site: str) -> ServerProcess:
    global _logged
    with _lock:
        for server in reversed(_idle):  # The last used server: its memory is not swapped out.
            if server.kind == (at_most, site):
                _idle.remove(server)
                return server
    if sys.platform != "linux":
        raise SandboxTrouble(f"The sandbox does not start on {sys.platform}")
    try:
        server = ServerProcess(at_most, site)
    except OSError as error:
        raise SandboxTrouble(f"The sandbox does not start: {error}") from error
    if not _logged:
        _logged = True
        lacks = f" ({server.trouble})" if server.trouble else ""
        severity = logging.INFO if server.level else logging.WARNING
        _LOG.log(severity, "Model-written code runs at sandbox level L%d%s.", server.level, lacks)
    return server


def _close_all() -> None:
    while _idle:
        _idle.pop().close()


def _forget() -> None:
    """Close the inherited servers in a forked child: they belong to the parent."""
    global _lock, _computing
    _lock, _computing = threading.Lock(), threading.Semaphore(default_workers())
    _close_all()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

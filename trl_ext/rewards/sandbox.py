"""Run model-written Python shut in, from any process and thread of a training run.

    level  what holds
    0      limits on processor time, memory, files; empty environment; a clean interpreter; a folder of its own
    1      and a system call filter (seccomp), no files but Python's own (Landlock), no further rights
    2      and users, processes, network, mounts and shared memory of its own (namespaces)

The highest level that works on the machine is found by trying, logged once, and kept. Jobs run in forks of a server
process (`sandbox_server`); each thread that runs a job at the same time as others uses a server of its own. Linux 5.3
or later; level 1 needs 5.13.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
HIGHEST_LEVEL = 2
_START_S = 30.0
# For programs that sleep. Time in which a program waits for a processor does not count.
WALL_PER_CPU = 5.0
# How much longer than its job a server may take before it counts as lost. Long: a machine may be ten times too small.
_GRACE_S, _CROWDED = 10.0, 10
# Without the package's own `__init__`, which imports what the standard library has not.
_START = """
import sys, types
root = sys.argv.pop(1)
for name, path in (("trl_ext", root), ("trl_ext.rewards", root + "/rewards")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from trl_ext.rewards.sandbox_server import main
main()
"""


class SandboxTrouble(OSError):
    """The machine could not run a job; says nothing about the code in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process of a job may use."""

    cpu_s: float
    memory_mib: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went.

    `ended`: "exit" by itself, "cpu" or "wall" at a time limit, "output" at the limit of output, "lost" where it took
    its server with it twice, which takes level 0.
    """

    ended: str
    code: int = 0
    cpu_s: float = 0.0
    output: bytes = b""
    note: str = ""  # what ended the code, in its own words


def run_program(source: bytes, stdin: bytes, limits: Limits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run a script on an input; its output is what it wrote to its standard output."""
    return _run([("program", (0, 1, 2, 3))], [source, stdin], limits, at_most)


def run_tests(source: bytes, job: bytes, limits: Limits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run a test job (see `sandbox_roles.run_judge`) against code; the output is the judge's report."""
    roles = [("candidate", (0, 4, 3)), ("judge", (1, 5, 2))]
    return _run(roles, [source, job], limits, at_most)


def sandbox_level(at_most: int = HIGHEST_LEVEL) -> tuple[int, str]:
    """The level that this machine gives, and what the next one lacks. Starts a server on the first call."""
    with _Borrowed(at_most) as server:
        return server.level, server.trouble


def _run(roles: Any, contents: Sequence[bytes], limits: Limits, at_most: int) -> Outcome:
    for _ in range(2):
        with _Borrowed(at_most) as server:
            try:
                return server.run(roles, contents, limits)
            except ConnectionError as error:
                server.lost = str(error)
                _LOG.warning("A sandbox server failed in the middle of a job: %s", error)
    if server.level > 0:
        raise SandboxTrouble(f"The sandbox's server failed twice: {server.lost}.")
    return Outcome("lost")  # Below level 1 a program can end its server, and must not gain by it.


class _Server:
    """A server process and the socket to it. One thread at a time."""

    def __init__(self, at_most: int) -> None:
        self.at_most, self.owner = at_most, os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = _start(theirs.fileno(), at_most)
        hello = self._receive(_START_S)
        self.level, self.trouble = int(hello["level"]), str(hello["trouble"])
        self.folder = str(hello["folder"])
        self.lost = ""  # why it serves no more

    def run(self, roles: Any, contents: Sequence[bytes], limits: Limits) -> Outcome:
        """Do one job. ConnectionError where the server is gone, SandboxTrouble where the machine refuses.

        The descriptors that travel: two contents, where output goes, where the note goes, and the ends of a link.
        """
        wall_s = limits.cpu_s * WALL_PER_CPU
        job = {"roles": roles, "cpu_s": limits.cpu_s, "wall_s": wall_s, "memory_mib": limits.memory_mib}
        with _Descriptors() as kept, _Descriptors() as given:
            given += [_in_memory(content) for content in contents]
            for reading, writing in (os.pipe(), os.pipe()):
                kept.append(reading)
                given.append(writing)
            given += [side.detach() for side in socket.socketpair()]
            socket.send_fds(self.control, [json.dumps(job).encode()], given)
            given.close()
            return self._follow(kept, limits.output_bytes, time.monotonic() + _CROWDED * wall_s + _GRACE_S)

    def _follow(self, kept: Sequence[int], most: int, deadline: float) -> Outcome:
        """Collect output until the reply; what is more than `most` bytes ends the job."""
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
        _read_rest(reading, output, most)
        words = bytearray()
        _read_rest(note, words, 0)
        return _outcome(reply, output, words, flooded or len(output) > most)

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
        """End the server and all that it runs."""
        self.control.close()
        if self.owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.0 if self.lost else 1.0)
            self.process.kill()
            self.process.wait()
            if self.folder:  # The server removes it, unless it was killed.
                shutil.rmtree(self.folder, ignore_errors=True)


class _Descriptors(list[int]):
    """Descriptors that are closed together."""

    def __enter__(self) -> "_Descriptors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self:
            os.close(self.pop())


class _Borrowed:
    """An idle server, or a new one; given back unless the job raised."""

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most

    def __enter__(self) -> _Server:
        self.server = _take(self.at_most)
        return self.server

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self.server.lost:
            _idle.append(self.server)
        else:
            self.server.close()


_idle: list[_Server] = []
_lock = threading.Lock()
_logged = False


def _take(at_most: int) -> _Server:
    with _lock:
        for server in _idle:
            if server.at_most == at_most:
                _idle.remove(server)
                return server
    try:
        server = _Server(at_most)
    except OSError as error:
        raise SandboxTrouble(f"The sandbox does not start: {error}") from error
    _log_level(server)
    return server


def _log_level(server: _Server) -> None:
    global _logged
    if not _logged:
        _logged = True
        lacks = f" ({server.trouble})" if server.trouble else ""
        _LOG.info("Model-written code runs at sandbox level L%d%s.", server.level, lacks)


def _close_all() -> None:
    while _idle:
        _idle.pop().close()


def _forget() -> None:
    """In a fork: the servers belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _close_all()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _start(control: int, at_most: int) -> subprocess.Popen[bytes]:
    """A clean interpreter: no site packages, no user's settings, nothing inherited but the socket."""
    # Sets of text iterate in an order that depends on the hash seed; same code, same verdict.
    environment = {"PYTHONHASHSEED": "0"} | {key: os.environ[key] for key in ["LD_LIBRARY_PATH"] if key in os.environ}
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _START, root, str(control), str(at_most)]
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


def _in_memory(content: bytes) -> int:
    """A descriptor of a file without a name, open at its start."""
    number = os.memfd_create("job")
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _read_some(reading: int, output: bytearray) -> bool:
    """Add what is there; False at the end, or where a pipe that does not block is empty."""
    try:
        part = os.read(reading, 2**16)
    except BlockingIOError:
        return False
    output += part
    return bool(part)


def _read_rest(reading: int, output: bytearray, most: int) -> None:
    """What is left in a pipe that nobody writes to any more, to a little above `most` bytes."""
    os.set_blocking(reading, False)
    while len(output) <= most and _read_some(reading, output):
        pass


def _outcome(reply: dict[str, Any], output: bytearray, note: bytearray, flooded: bool) -> Outcome:
    if reply["ended"] == "trouble":
        raise SandboxTrouble(f"The sandbox failed: {reply['trouble']}")
    ended = "output" if flooded else reply["ended"]
    return Outcome(ended, reply["codes"][-1], max(reply["cpu_s"]), bytes(output), note[:300].decode(errors="replace"))

"""The process that forks the sandbox's processes, watches them and ends them: one job at a time.

A clean interpreter with the usual modules loaded forks in a millisecond; a fresh start takes thirty. It passes a job's
source, input, output and tests on as descriptors, unread, so its memory holds nothing of an earlier job.

It is separate from the training process because it adopts orphans, and so that no fork copies a trainer's memory.
"""

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trl_ext.rewards.isolation import kernel
from trl_ext.rewards.isolation.sandbox.child import STANDS, WAITS, run_role, shut_in
from trl_ext.rewards.isolation.sandbox.restrictions import open_rules

_LOOK_EVERY_MS = 5  # how often processor time is read; four times as long once the job has slept
# The most used modules, loaded once for all programs.
_PRELOADED = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys textwrap typing"
).split()
_NUMPY = "numpy numpy.random numpy.fft numpy.linalg numpy.polynomial".split()


class Server:
    """Serves jobs on a SEQPACKET socket, one job or reply a message, until the other end closes."""

    def __init__(self, control: socket.socket, at_most: int, packages: Sequence[str]) -> None:
        self.control, self.packages = control, packages
        self.rules = -1
        self.folder = ""
        self.level, self.trouble = self._enter(at_most)

    def _enter(self, at_most: int) -> tuple[int, str]:
        """Enter the highest level that works; return the level and why the next level fails."""
        trouble = ""
        if at_most >= 2:
            trouble = trouble_in_fork(_try_namespaces)
            if not trouble:  # Continue as process 1 of new namespaces; the outer process waits and ends with it.
                kernel.enter_namespaces()
                if pid := os.fork():
                    self.control.close()
                    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
                kernel.die_with_parent(0)  # Seen from inside, a parent outside has number 0.
        kernel.adopt_orphans()
        kernel.hide_memory()
        level = min(at_most, 1 if trouble else 2)
        if level >= 1 and (refused := trouble_in_fork(_try_sandbox)):
            level, trouble = 0, refused
        if level >= 1:
            self.rules = open_rules(self.packages)
            os.chdir("/")
        else:
            self.folder = tempfile.mkdtemp(prefix="sandbox-")
            os.chdir(self.folder)
        return level, trouble

    def serve(self) -> None:
        """Send the level to the other end, then do jobs until it closes."""
        hello = {"level": self.level, "trouble": self.trouble, "folder": self.folder}
        try:
            self.control.send(json.dumps(hello).encode())
            while True:
                message, descriptors, _, _ = socket.recv_fds(self.control, 2**16, 16)
                if not message:
                    break
                job = json.loads(message)
                if "stop" not in job:  # A "stop" here came too late: its job has ended.
                    job |= {"level": self.level, "parent": os.getpid()}
                    self.control.send(json.dumps(self._run(job, descriptors)).encode())
        except ConnectionError:  # The other end is gone, perhaps in the middle of a job.
            pass
        finally:
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, job: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Fork the job's processes, wait until the last process ends, and end the others."""
        pids: list[int] = []
        waits: list[int] = []
        failed: list[str] = []
        for role, places in job["roles"]:
            given = [descriptors[place] for place in places]
            if not self._start(role, given, job, pids, waits):
                failed.append(role)
        for descriptor in descriptors:
            os.close(descriptor)
        ended = "trouble" if failed else self._watch(pids, waits, job)
        for descriptor in waits:
            os.close(descriptor)
        ends = self._end(pids)
        if ended == "exit" and max(ends["cpu_s"]) > job["cpu_s"]:
            ended = "cpu"  # It ended between two readings.
        return {"ended": ended, "trouble": ", ".join(failed), **ends}

    def _start(self, role: str, given: list[int], job: dict[str, Any], pids: list[int], waits: list[int]) -> bool:
        """Fork a process for a role; return True once it is confined.

        Args:
            role: Name of the role to run.
            given: The role's descriptors.
            job: The job, as it was sent.
            pids: Receives the process id.
            waits: Receives the file of the process's waits.
        """
        ready, theirs = socket.socketpair()
        with ready, theirs:
            try:
                pid = os.fork()
            except OSError:  # The machine has no room for a process.
                return False
            if pid == 0:
                try:
                    self.control.close()
                    run_role(role, given, theirs.fileno(), self.rules, job)
                finally:
                    os._exit(1)
            theirs.close()
            pids.append(pid)
            _, files, _, _ = socket.recv_fds(ready, len(WAITS), 1)
            waits += files
            return ready.recv(1) == STANDS

    def _watch(self, pids: list[int], waits: list[int], job: dict[str, Any]) -> str:
        """Wait until the last process ends or a limit is reached; return "exit", "cpu", "wall" or "stopped".

        The wall clock only counts time in which all threads sleep, not time in which a thread computes or waits for a
        processor: verdicts do not depend on the machine's load. Sends a message at the first sleep.
        """
        started, told = time.monotonic(), False
        ending = os.pidfd_open(pids[-1])
        poll = select.poll()
        poll.register(ending, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        try:
            while True:
                ready = dict(poll.poll(_LOOK_EVERY_MS * (4 if told else 1)))
                if ending in ready:
                    return "exit"
                if ready:
                    return "stopped"
                used = [kernel.cpu_seconds(pid) for pid in pids]
                if max(used) > job["cpu_s"]:
                    return "cpu"
                seconds, asleep = zip((0.0, True), *map(waits_of, waits), strict=True)
                slept_s = time.monotonic() - started - sum(used) - sum(seconds)
                if slept_s > job["wall_s"]:
                    return "wall"
                if 1000 * slept_s > _LOOK_EVERY_MS and all(asleep) and not told:
                    told = True
                    self.control.send(b'{"sleeps": 1}')
        finally:
            os.close(ending)

    def _end(self, pids: list[int]) -> dict[str, Any]:
        """Kill the rest of a job, grandchildren included; return how its processes ended."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ends = [os.wait4(pid, 0) for pid in pids]
        if os.getpid() == 1:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # Everything else in this namespace.
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        elif self.level == 0:
            with suppress(ChildProcessError):  # Until no child is left: a kill may turn grandchildren into children.
                while True:
                    for pid in kernel.children():
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGKILL)
                    os.waitpid(-1, 0)
            with suppress(OSError):
                os.chmod(self.folder, 0o700)
            for entry in os.scandir(self.folder):  # Files of the program.
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
        codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ends]
        return {"codes": codes, "cpu_s": [usage.ru_utime + usage.ru_stime for _, _, usage in ends]}


def _try_namespaces() -> None:
    """namespaces"""
    try:
        kernel.enter_namespaces()
    except OSError as error:
        raise OSError(f"{error}; {kernel.why_no_namespaces()}") from error
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _try_sandbox() -> None:
    """seccomp and Landlock"""
    shut_in({"cpu_s": 5, "memory_mib": 512, "level": 1}, open_rules())
    for forbidden in (socket.socket, os.fork, lambda: open("/proc/self/environ", "rb"), lambda: os.kill(1, 0)):
        try:
            forbidden()
        except PermissionError:
            continue
        raise OSError(f"the kernel took the filter and let {getattr(forbidden, '__name__', 'it')} pass")


def waits_of(threads: int) -> tuple[float, bool]:
    """Return the seconds that the threads in a folder of /proc waited for a processor, and whether all sleep."""
    waited_ns, asleep, at = 0, True, partial(os.open, dir_fd=threads)
    with suppress(OSError):
        for thread in os.listdir(threads):
            with suppress(OSError), open(f"{thread}/stat", "rb", opener=at) as state:
                asleep &= state.read().rpartition(b")")[2].split()[0] == b"S"
                with open(f"{thread}/schedstat", "rb", opener=at) as times:
                    waited_ns += int(times.read().split()[1])
    return waited_ns / 1e9, asleep


def trouble_in_fork(attempt: Any) -> str:
    """Call `attempt` in a fork; return the error's text, empty if it works. This process does not change."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        except BaseException as error:
            os.write(writing, f"{attempt.__doc__}: {error}"[:500].encode())
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as file:
        trouble = file.read().decode()
    failed = os.waitpid(pid, 0)[1]
    return trouble or ("a trial ended early" if failed else "")


def main() -> None:
    """Serve jobs. Arguments: an inherited socket, the highest level, and NumPy's folder or ""."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process; its end ends this process.
    site = sys.argv[3]
    sys.path.append(site)
    for name in _PRELOADED + _NUMPY * bool(site):
        importlib.import_module(name)
    sys.path.pop()  # Programs may not import the other packages there.
    if site:
        sys.modules["numpy"].random.seed(0)  # Same code, same verdict, as with `random`.
    kernel.die_first()
    control = socket.socket(fileno=int(sys.argv[1]))
    server = Server(control, int(sys.argv[2]), [f"{site}/numpy", f"{site}/numpy.libs"] if site else [])
    gc.freeze()
    server.serve()

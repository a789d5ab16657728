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
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from trl_ext.rewards.isolation.sandbox.client import JobLimits, Outcome, SandboxTrouble, ServerProcess
from trl_ext.rewards.isolation.workers.limits import default_workers

_LOG = logging.getLogger(__name__)
HIGHEST_LEVEL = 2
# Jobs at a time, all but `default_workers()` of them asleep. Each takes four descriptors and up to its memory limit.
MOST_JOBS = max(default_workers(), min(64, 8 * (default_workers() + 1)))


def run_program(source: bytes, stdin: bytes, limits: JobLimits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run a script on an input; the output is its standard output."""
    return _run([("program", (0, 1, 2, 3))], [source, stdin], limits, at_most)


def run_tests(source: bytes, job: bytes, limits: JobLimits, at_most: int = HIGHEST_LEVEL) -> Outcome:
    """Run a test job (see `roles.run_judge`) against code; the output is the judge's report."""
    roles = [("candidate", (0, 4, 3)), ("judge", (1, 5, 2))]
    return _run(roles, [source, job], limits, at_most)


def sandbox_level(at_most: int = HIGHEST_LEVEL, site: str = "") -> tuple[int, str]:
    """Return this machine's level and why the next level fails. Starts a server on the first call."""
    with _computing, _borrowed(at_most, site) as server:
        return server.level, server.trouble


def _run(roles: Any, contents: Sequence[bytes], limits: JobLimits, at_most: int) -> Outcome:
    for _ in range(2):
        with ExitStack() as turn:
            turn.enter_context(_computing)
            with _borrowed(at_most, limits.site) as server:
                try:
                    return server.run(roles, contents, limits, on_sleep=turn.close)
                except ConnectionError as error:
                    server.lost = str(error)
                    _LOG.warning("A sandbox server failed in the middle of a job: %s", error)
    if server.level > 0:
        raise SandboxTrouble(f"The sandbox's server failed twice: {server.lost}.")
    return Outcome("lost")  # At level 0 a program can end its server, and must not gain by it.


@contextmanager
def _borrowed(at_most: int, site: str) -> Iterator[ServerProcess]:
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

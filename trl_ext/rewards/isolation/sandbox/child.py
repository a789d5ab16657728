"""Confine a process of the sandbox, between its fork and the first line of model-written code."""

import fcntl
import math
import os
import resource
import socket
from collections.abc import Sequence
from typing import Any

from trl_ext.rewards.isolation.kernel import die_with_parent, drop_capabilities, forbid_new_privileges
from trl_ext.rewards.isolation.sandbox.landlock import restrict
from trl_ext.rewards.isolation.sandbox.roles import CHANNEL, NOTE, REPORT, run_to_end
from trl_ext.rewards.isolation.sandbox.seccomp import install_filter

WAITS, STANDS = b"w", b"1"
_MIB = 2**20
_OPEN_FILES = 64
_FILE_BYTES = _MIB  # Level 0 only: above it no file can be written.
_THREADS = 64
# Numbers of a role's descriptors, without its first descriptor, which holds the source.
_PLACES = {"program": (0, 1, NOTE), "candidate": (CHANNEL, NOTE), "judge": (CHANNEL, REPORT)}


def run_role(role: str, given: Sequence[int], ready: int, rules: int, job: dict[str, Any]) -> None:
    """Run a role in this process; never returns.

    Args:
        role: A key of `_PLACES`.
        given: Descriptors: the source, then the descriptors in `_PLACES`.
        ready: Socket that gets `WAITS`, with a folder that holds each thread's waiting time for a processor, and then
            `STANDS` once the sandbox is set up; without `STANDS`, the set-up has failed.
        rules: Descriptor of the Landlock rules, -1 at level 0.
        job: The request with its limits and the sandbox's level.
    """
    os.setsid()
    die_with_parent(job["parent"])
    os.environ.clear()
    with open(given[0], "rb") as file:
        source = file.read()
    ready, rules = place(given[1:], _PLACES[role], ready, rules)
    # In this folder the kernel counts the threads' waits; without it the waits count as wall-clock time.
    with socket.socket(fileno=os.dup(ready)) as channel:
        try:
            waits = [os.open("/proc/self/task", os.O_RDONLY)]
        except OSError:
            waits = []
        socket.send_fds(channel, [WAITS], waits)
    for descriptor in waits:
        os.close(descriptor)
    shut_in(job, rules)
    os.write(ready, STANDS)
    os.closerange(max(_PLACES[role] + (2,)) + 1, _OPEN_FILES * 4)
    run_to_end(role, source)


def place(given: Sequence[int], places: Sequence[int], ready: int, rules: int) -> tuple[int, int]:
    """Move descriptors to the role's numbers, close all others; return the new numbers of `ready` and `rules`."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 32) if number >= 0 else -1 for number in (*given, ready, rules)]
    os.closerange(3, 32)
    for number, target in zip(high, places, strict=False):
        os.dup2(number, target)
    return high[-2], high[-1]


def shut_in(job: dict[str, Any], rules: int) -> None:
    """Set limits, drop rights, and from level 1 on restrict files and system calls. Cannot be undone."""
    set_limits(job["cpu_s"], job["memory_mib"], job["level"])
    drop_capabilities()
    forbid_new_privileges()
    if job["level"] >= 1:
        restrict(rules)
        install_filter()


def set_limits(cpu_s: float, memory_mib: int, level: int) -> None:
    """Set limits in the kernel. The server also measures processor time, in finer steps than whole seconds."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(cpu_s) + 1,
        resource.RLIMIT_AS: memory_mib * _MIB,
        resource.RLIMIT_FSIZE: _FILE_BYTES if level == 0 else 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    # Below level 2 the kernel counts all processes of the user; 0 forbids new processes and threads. At level 1 the
    # filter forbids processes and allows threads.
    if level != 1:
        limits[resource.RLIMIT_NPROC] = 0 if level == 0 else _THREADS
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))

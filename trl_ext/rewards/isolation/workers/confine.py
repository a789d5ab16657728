"""Limits of a worker that the kernel keeps, and what it has used and left behind."""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from trl_ext.rewards.isolation.kernel import die_first, die_with_parent

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# RLIMIT_CPU counts whole seconds; it is the backstop of the fork server's own watch.
CPU_SLACK_S = 2


def confine(parent: int) -> None:
    """Bind this process to its parent's life, make it the first that a machine without memory kills, no core files.

    It leads a session of its own, so that a signal to its group reaches what it forks.
    """
    os.setsid()
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_first()


def address_space_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * PAGE_BYTES


def renew_limits(cpu_s: float, address_space: int) -> None:
    """Set the kernel's limits for the next row: further processor seconds, and bytes of address space in all."""
    lower(resource.RLIMIT_CPU, int(time.process_time() + cpu_s) + CPU_SLACK_S)
    lower(resource.RLIMIT_AS, address_space)


def lower(kind: int, value: int) -> None:
    """Set a soft limit, below the hard one that the user's shell or cluster gave."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def num_threads() -> int:
    """Threads of this process, those that Python does not know included."""
    return os.stat("/proc/self/task").st_nlink - 2


def has_children() -> bool:
    """True where this process has children, running or not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def waited_seconds(pid: int) -> float:
    """Time that a process's threads were ready to run and had no processor; 0.0 where the kernel keeps no record."""
    waited_ns = 0
    for record in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # The thread has just ended.
            waited_ns += int(record.read_bytes().split()[1])
    return waited_ns / 1e9


def kill_group(pid: int) -> None:
    """Kill a worker and its process group, at once, so that a child that forks cannot outrun it."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)

"""A worker's limits in the kernel, and measures of its time, memory, threads and children."""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from trl_ext.rewards.isolation.kernel import die_first, die_with_parent

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# RLIMIT_CPU counts whole seconds; it is the backstop of the fork server's watch.
CPU_SLACK_S = 2


def confine(parent: int) -> None:
    """End with the parent, be the first killed when memory runs out, write no core files.

    The process leads a new session, so that a signal to its group reaches its forks.
    """
    os.setsid()
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_first()


def address_space_bytes() -> int:
    """Return the address space of this process in bytes."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * PAGE_BYTES


def renew_limits(cpu_s: float, address_space: int) -> None:
    """Set the kernel's limits for the next row: additional processor seconds, and total bytes of address space."""
    lower(resource.RLIMIT_CPU, int(time.process_time() + cpu_s) + CPU_SLACK_S)
    lower(resource.RLIMIT_AS, address_space)


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
        with contextlib.suppress(OSError, IndexError, ValueError):  # The thread has just ended.
            waited_ns += int(record.read_bytes().split()[1])
    return waited_ns / 1e9


def kill_group(pid: int) -> None:
    """Kill a worker and its process group at once, so that a child that forks cannot escape."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)

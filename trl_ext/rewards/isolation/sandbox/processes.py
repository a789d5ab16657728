"""A server's processes: forked, measured, and ended with all their descendants."""

import os
import signal
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.kernel import children


def fork_if_possible() -> int | None:
    """0 in the new process, its number here, None where the machine has no room for one."""
    try:
        return os.fork()
    except OSError:
        return None


def waited_seconds(waits: int) -> float:
    """Time that a process's main thread was ready to run and had no processor; 0.0 after its end."""
    try:
        return int(os.pread(waits, 100, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def kill_namespace() -> None:
    """Kill everything else in this namespace; to be called by its process 1."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def kill_descendants() -> None:
    """Kill children until none is left; the orphans that this makes become children in turn."""
    with suppress(ChildProcessError):
        while True:
            for pid in children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def trouble_in_fork(attempt: Any) -> str:
    """Make an attempt in a fork; the text of what goes wrong, empty where it works. This process stays as it is."""
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

"""Calls of the Linux kernel for workers and sandbox: processes, capabilities, namespaces.

They call the C library through ctypes if Python has no such function, and raise OSError if the kernel refuses. Numbers
are from linux/prctl.h, linux/capability.h and linux/sched.h. Imports only the standard library: the sandbox's
interpreter starts without site packages.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
# Mounts, host name, shared memory, users, processes, network.
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

# Settings that can refuse namespaces to users without root, as sysctl names them: the value that refuses, and a value
# that allows. Debian has the second, Ubuntu the third.
_NAMESPACE_SETTINGS = {
    "user.max_user_namespaces": ("0", "10000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a C library function with whole numbers and pointers; OSError if it returns less than 0."""
    plain = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(getattr(_libc, name)(*plain))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, *arguments: Any) -> int:
    """Call prctl(2) with zeros for the missing ones of its five arguments."""
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def forbid_new_privileges() -> None:
    """Forbid set-user-id programs to gain rights; seccomp and Landlock need this. Cannot be undone."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def hide_memory() -> None:
    """Forbid other processes of the same user to trace this process or read its memory. Forks inherit it."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, detached processes included."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; exit if the process `parent` has already ended."""
    prctl(_PR_SET_PDEATHSIG, int(by))
    if os.getppid() != parent:  # It ended before prctl.
        os._exit(1)


def die_first() -> None:
    """Make this process the first that the kernel kills when memory runs out, before any trainer."""
    with suppress(OSError):  # No /proc, or a sandbox that refuses: it is only a hint to the kernel.
        Path("/proc/self/oom_score_adj").write_text("1000")


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process, all its threads together; 0.0 if it has ended.

    The clock's number is MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of linux/posix-timers.h.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def children() -> set[int]:
    """Return the process ids of this process's children, adopted children included. Needs a single thread."""
    me = os.getpid()
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()}
    except FileNotFoundError:  # A kernel without CONFIG_PROC_CHILDREN.
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # It has ended.
                # The name is in parentheses and may hold any character.
                if int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == me:
                    found.add(int(process.name))
        return found


def drop_capabilities() -> None:
    """Drop all rights of root except access to root's files."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def enter_namespaces() -> None:
    """Enter new namespaces for users, network, mounts, host name, shared memory and, from the next fork on, processes.

    The user keeps its id, and so its files, but has no rights over anything outside.
    """
    user, group = os.getuid(), os.getgid()
    call("unshare", _NEW_NAMESPACES)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def why_no_namespaces() -> str:
    """Return a sentence that names what refuses namespaces here, and the command that allows them."""
    for name, (refuses, allows) in _NAMESPACE_SETTINGS.items():
        with suppress(OSError):
            if Path("/proc/sys", *name.split(".")).read_text().strip() == refuses:
                return f"{name} is {refuses}; to allow user namespaces: sudo sysctl -w {name}={allows}"
    return "the container or a security module refuses user namespaces; Docker's seccomp profile does"

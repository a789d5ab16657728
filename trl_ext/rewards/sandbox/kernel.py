"""What the sandbox asks of the Linux kernel and Python's standard library has no call for.

Plain C library calls through ctypes: process attributes (prctl), capabilities, namespaces. All raise OSError where the
kernel refuses. Imported in sandbox processes only, which are single-threaded here; numbers are from linux/prctl.h,
linux/capability.h and linux/sched.h.
"""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """A C library function with whole numbers and pointers as arguments; OSError where it returns less than 0."""
    plain = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(getattr(_libc, name)(*plain))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, *arguments: Any) -> int:
    """The prctl call, filled up to its five arguments with zeros."""
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def forbid_new_privileges() -> None:
    """From here on no set-user-id program gains rights; seccomp and Landlock demand it. Cannot be undone."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def hide_memory() -> None:
    """Other processes of the same user may no longer trace this one or read its memory. A fork inherits it."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Descendants whose parents die become this process's children, so that it can find and end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent ends; `parent` is its process id as seen before, in case it has ended already."""
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """Give up all rights of root beyond owning root's files."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def enter_namespaces() -> None:
    """Leave the machine's users, network, mounts, host name and shared memory, and with the next fork its processes.

    The user keeps its number, so it owns what it owned, but has no rights over anything outside.
    """
    user, group = os.getuid(), os.getgid()
    call("unshare", _NEW_USER | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_MOUNTS | _NEW_PIDS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")

"""The files that model-written code may open: a Landlock rule set (Linux 5.13 and later).

Code may read the standard library, shared libraries and time zones, and write /dev/null. Everything else is closed,
including /proc, which shows memory and environment of the user's other processes. Landlock also forbids tracing outer
processes, and from its version 6 signals to them.

Source: linux/landlock.h.
"""

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Sequence

from trl_ext.rewards.isolation.kernel import call

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # The same on all processors.
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
# Number of rights over files in each version of the interface.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_FILE_RIGHTS_NEWEST = 16


def version() -> int:
    """Return the kernel's Landlock version; OSError without Landlock."""
    return call("syscall", _CREATE, None, 0, _VERSION_FLAG)


def open_rules(packages: Sequence[str] = ()) -> int:
    """Return a descriptor of the rule set, for many processes; the folders `packages` are readable, too."""
    abi = version()
    # Fields: rights over files, over ports (from 4: bind and connect), scopes (from 6: abstract sockets, signals).
    fields = [(1 << _FILE_RIGHTS.get(abi, _FILE_RIGHTS_NEWEST)) - 1] + [3] * (abi >= 4) + [3] * (abi >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = call("syscall", _CREATE, ctypes.c_char_p(attributes), len(attributes), 0)
    # The standard library, and the shared libraries of its modules.
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    linked = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
    for path in (*sorted(filter(None, standard)), os.path.join(sys.base_prefix, "lib"), *linked, *packages):
        _allow(rules, path, _READ | _READ_DIR if os.path.isdir(path) else _READ)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        _allow(rules, path, _READ | _WRITE * (path == "/dev/null"))
    return rules


def restrict(rules: int) -> None:
    """Apply the rules to this process and all that it starts. Needs `forbid_new_privileges`; cannot be undone."""
    call("syscall", _RESTRICT, rules, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    """Add a right, unless the path does not exist."""
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        attributes = struct.pack("=Qi", rights, beneath)
        call("syscall", _ADD, rules, _PATH_BENEATH, ctypes.c_char_p(attributes), 0)
    finally:
        os.close(beneath)

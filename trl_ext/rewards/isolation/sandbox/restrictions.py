"""What the kernel lets model-written code do: a Landlock rule set for files, a seccomp filter for system calls.

Landlock (Linux 5.13 and later): code may read the standard library, shared libraries and time zones, and write
/dev/null. Everything else is closed, including /proc, which shows memory and environment of the user's other
processes. Landlock also forbids tracing outer processes, and from its version 6 signals to them.

The filter, assembled by hand, lists allowed calls, so the new calls of later kernels are forbidden from the start. The
interpreter may compute, read files that Landlock allows, start threads, and signal itself. It may not use sockets,
start processes and programs, trace, signal others, rename and delete, or use mounts, namespaces, io_uring, keys and
bpf. A forbidden call fails with EPERM, in Python a PermissionError.

Source: linux/landlock.h, linux/seccomp.h, linux/bpf_common.h; numbers of arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h.
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Sequence
from errno import ENOSYS, EPERM

from trl_ext.rewards.isolation.kernel import call, prctl

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


_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes on 32-bit words
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # byte offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # x86-64 only: bit of a second table of system calls, which the numbers below do not cover
# Calls of Python's files: is it a terminal, its size, bytes available, close on exec, no blocking.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451, 0x5421)

# Duplicates, flags, close on exec. Without F_SETOWN and F_SETSIG: with these the kernel sends signals to others.
_FCNTLS = (0, 1, 2, 3, 4, 1030)

# Of each processor: its number in struct seccomp_data, plain calls, and calls whose arguments are checked.
_X86_64 = (
    0xC000003E,
    "read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 "
    "rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 pread64 17 pwrite64 18 readv 19 writev 20 access 21 pipe 22 "
    "select 23 sched_yield 24 mremap 25 mincore 27 madvise 28 dup 32 dup2 33 pause 34 nanosleep 35 getitimer 36 "
    "alarm 37 setitimer 38 getpid 39 recvfrom 45 socketpair 53 exit 60 uname 63 getcwd 79 readlink 89 umask 95 "
    "gettimeofday 96 getrlimit 97 getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108 "
    "getppid 110 getpgrp 111 getgroups 115 getresuid 118 getresgid 120 getpgid 121 getsid 124 rt_sigpending 127 "
    "rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 statfs 137 fstatfs 138 arch_prctl 158 gettid 186 time 201 "
    "futex 202 sched_getaffinity 204 getdents64 217 set_tid_address 218 restart_syscall 219 fadvise64 221 "
    "clock_gettime 228 clock_getres 229 clock_nanosleep 230 exit_group 231 epoll_wait 232 epoll_ctl 233 openat 257 "
    "newfstatat 262 readlinkat 267 faccessat 269 pselect6 270 ppoll 271 set_robust_list 273 get_robust_list 274 "
    "epoll_pwait 281 eventfd2 290 epoll_create1 291 dup3 292 pipe2 293 preadv 295 pwritev 296 getcpu 309 "
    "getrandom 318 membarrier 324 statx 332 rseq 334 close_range 436 faccessat2 439",
    {"ioctl": 16, "fcntl": 72, "sendto": 44, "clone": 56, "kill": 62, "tgkill": 234, "prlimit64": 302, "clone3": 435},
)
_AARCH64 = (
    0xC00000B7,
    "getcwd 17 eventfd2 19 epoll_create1 20 epoll_ctl 21 epoll_pwait 22 dup 23 dup3 24 statfs 43 fstatfs 44 "
    "faccessat 48 openat 56 close 57 pipe2 59 getdents64 61 lseek 62 read 63 write 64 readv 65 writev 66 pread64 67 "
    "pwrite64 68 preadv 69 pwritev 70 pselect6 72 ppoll 73 readlinkat 78 newfstatat 79 fstat 80 exit 93 "
    "exit_group 94 set_tid_address 96 futex 98 set_robust_list 99 get_robust_list 100 nanosleep 101 getitimer 102 "
    "setitimer 103 clock_gettime 113 clock_getres 114 clock_nanosleep 115 sched_getaffinity 123 sched_yield 124 "
    "restart_syscall 128 sigaltstack 132 rt_sigsuspend 133 rt_sigaction 134 rt_sigprocmask 135 rt_sigpending 136 "
    "rt_sigtimedwait 137 rt_sigreturn 139 getresuid 148 getresgid 150 times 153 getpgid 155 getsid 156 getgroups 158 "
    "uname 160 getrlimit 163 getrusage 165 umask 166 getcpu 168 gettimeofday 169 getpid 172 getppid 173 getuid 174 "
    "geteuid 175 getgid 176 getegid 177 gettid 178 sysinfo 179 socketpair 199 recvfrom 207 brk 214 munmap 215 "
    "mremap 216 mmap 222 fadvise64 223 mprotect 226 mincore 232 madvise 233 getrandom 278 membarrier 283 statx 291 "
    "rseq 293 close_range 436 faccessat2 439",
    {"fcntl": 25, "sendto": 206, "ioctl": 29, "kill": 129, "tgkill": 131, "clone": 220, "prlimit64": 261}
    | {"clone3": 435},
)
MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter() -> None:
    """Apply the filter to this process and all that it starts; OSError if the kernel refuses. Cannot be undone."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(ENOSYS, f"no system call table for {machine}")
    program = assemble(machine, os.getpid())
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(program) // 8, program)))


def assemble(machine: str, pid: int) -> bytes:
    """Return the filter as BPF instructions of 8 bytes. `pid` is the only process that may be signalled."""
    arch, plain, special = MACHINES[machine]
    steps = [_step(_LOAD, _MACHINE), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    steps += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for number in plain_numbers(plain):
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    steps += _guarded(special["clone"], 0, _ANY_BIT, (_CLONE_THREAD,))
    steps += _guarded(special["ioctl"], 1, _EQUAL, _IOCTLS)
    steps += _guarded(special["fcntl"], 1, _EQUAL, _FCNTLS)
    for name in ("kill", "tgkill"):
        steps += _guarded(special[name], 0, _EQUAL, (pid,))
    steps += _guarded(special["prlimit64"], 0, _EQUAL, (0, pid))
    # Allowed if both words of its address are null: asyncio's pair of sockets needs no address.
    low, high = (_step(_LOAD, _ARGUMENTS + 8 * 4 + offset) for offset in (0, 4))
    null, refused = _step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | EPERM)
    inner = [low, _step(_EQUAL, 0, 0, 3), high, _step(_EQUAL, 0, 0, 1), null, refused]
    steps += [_step(_EQUAL, special["sendto"], 0, len(inner)), *inner]
    # The C library then falls back to clone, whose flags a filter can see.
    steps += [_step(_EQUAL, special["clone3"], 0, 1), _step(_RETURN, _ERRNO | ENOSYS)]
    return b"".join([*steps, _step(_RETURN, _ERRNO | EPERM)])


def plain_numbers(table: str) -> list[int]:
    """Return the numbers in a table of `name number` pairs."""
    return [int(number) for number in table.split()[1::2]]


def _guarded(number: int, argument: int, test: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow the call if the low word of an argument passes the test with one of the values, else EPERM.

    Args:
        number: Number of the system call.
        argument: Index of the argument, from 0.
        test: A comparison of the filter, such as `_EQUAL`.
        values: Values for which the call is allowed.
    """
    inner = [_step(_LOAD, _ARGUMENTS + 8 * argument)]
    for value in values:
        inner += [_step(test, value, 0, 1), _step(_RETURN, _ALLOW)]
    inner.append(_step(_RETURN, _ERRNO | EPERM))
    return [_step(_EQUAL, number, 0, len(inner)), *inner]


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a struct sock_filter, an instruction of the filter.

    Args:
        code: The instruction.
        operand: Its constant.
        if_true, if_false: Instructions that a comparison skips.
    """
    return struct.pack("=HBBI", code, if_true, if_false, operand)

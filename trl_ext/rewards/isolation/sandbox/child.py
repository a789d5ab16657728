"""Confine a process of the sandbox after its fork, then run its role: program, candidate, or tests of a candidate."""

import atexit
import builtins
import fcntl
import importlib
import io
import json
import math
import os
import random
import resource
import socket
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.kernel import die_with_parent, drop_capabilities, forbid_new_privileges
from trl_ext.rewards.isolation.sandbox import pytest_names
from trl_ext.rewards.isolation.sandbox.channel import ALL_OPERATIONS, CALLS_ONLY, Channel, ChannelLost, printable
from trl_ext.rewards.isolation.sandbox.restrictions import install_filter, restrict

CHANNEL, REPORT, NOTE = 3, 4, 5  # descriptors: the channel, the judge's report, the code's exception


def outcome_of(function: Any, *arguments: Any) -> int:
    """Call a function; return the process's exit code, and write an exception to NOTE."""
    try:
        function(*arguments)
    except SystemExit as error:
        return error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        note = f"{type(error).__name__}: {printable(error)}".removesuffix(": ")
        with suppress(OSError):
            os.write(NOTE, note.encode(errors="replace"))
        return 1
    return 0


def run_program(source: bytes) -> None:
    """Run a script as `python script.py` would: input on descriptor 0, output on 1."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    exec(compile(source, "answer.py", "exec"), main_module().__dict__)


def run_candidate(source: bytes) -> None:
    """Run code that defines something, then let the tests use it. It gets arguments, never an expected value."""
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    main = main_module()
    with suppress(SystemExit):  # A script's last line; the lines above it have run.
        exec(compile(source, "answer.py", "exec"), main.__dict__)
    Channel(CHANNEL, CHANNEL, ALL_OPERATIONS, main.__dict__).serve()


def main_module() -> types.ModuleType:
    """Return a new module `__main__`; add the built-ins that Python's `site` would define."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = ["answer.py"]
    random.seed(0)  # Same code, same verdict.
    return main


def run_judge(source: bytes) -> None:
    """Run the steps of a test against the candidate on the other end of the channel, and report.

    Args:
        source: JSON with the fields of `Suite`, and `all`: whether to continue after a failed test.

    The report is JSON: the number of tests passed, the first failure, and whether the tests are at fault. They are if
    an import or a setup fails: these do not use the candidate.
    """
    job = json.loads(source)
    channel = Channel(CHANNEL, CHANNEL, CALLS_ONLY, {})
    passed, failure, unfit = 0, "", False
    try:
        scope = test_scope(job, channel)
        for text, kind in job["steps"]:
            step_failure = failure_of(text, scope, channel)
            failure = failure or step_failure
            passed += kind == "test" and not step_failure
            unfit |= kind == "import" and step_failure.startswith(("ImportError", "ModuleNotFoundError"))
            unfit |= kind == "setup" and bool(step_failure)
            if step_failure and (channel.lost or kind != "test" or not job["all"]):
                break
    except ChannelLost as error:
        failure = str(error)
    os.write(REPORT, json.dumps([passed, failure, unfit]).encode())


def failure_of(text: str, scope: dict[str, Any], channel: Channel) -> str:
    """Run a step; return the error's text, "" if it works."""
    try:
        exec(compile(text, "tests", "exec"), scope)
    except BaseException as error:
        return f"{type(error).__name__}: {printable(error)}".removesuffix(": ")
    return "the code under test has ended" if channel.lost else ""


def test_scope(job: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Return the names that the tests use and do not define: Python's, and the candidate's for each name in `names`.

    A name that the candidate lacks is undefined and fails at its use; Python's built-in never replaces it.
    """
    sys.modules["pytest"], sys.modules["solution"] = pytest_names, types.ModuleType("solution")
    # The candidate's `__all__` could replace built-ins, its `__path__` could make files modules.
    vars(sys.modules["solution"]).update(__getattr__=channel.look_up, __all__=(), __path__=())
    own = {name: thing for name, thing in vars(builtins).items() if name not in job["names"]}
    scope = {"__name__": "tests", "__builtins__": own}
    scope |= {name: importlib.import_module(name) for name in job["modules"]}
    for name, theirs in job["names"].items():
        with suppress(AttributeError):
            scope[name] = channel.look_up(theirs)
    return scope


ROLES = {"program": run_program, "candidate": run_candidate, "judge": run_judge}


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
    code = outcome_of(ROLES[role], source)
    # End as Python would, but without freeing the interpreter's memory: that takes longer than most programs.
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush):  # type: ignore[attr-defined]
        code = outcome_of(last) or code
    os._exit(code)


def place(given: Sequence[int], places: Sequence[int], ready: int, rules: int) -> tuple[int, int]:
    """Move descriptors to the role's numbers, close all others; return the new numbers of `ready` and `rules`.

    Args:
        given: The role's descriptors.
        places: The number that each of them gets.
        ready, rules: Descriptors that are kept above the places, -1 for none.
    """
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 32) if number >= 0 else -1 for number in (*given, ready, rules)]
    os.closerange(3, 32)
    for number, target in zip(high, places, strict=False):
        os.dup2(number, target)
    return high[-2], high[-1]


def shut_in(job: dict[str, Any], rules: int) -> None:
    """Set limits, drop rights, and from level 1 on restrict files and system calls. Cannot be undone."""
    level = job["level"]
    limits = {
        # The server also measures processor time, in finer steps than whole seconds.
        resource.RLIMIT_CPU: math.ceil(job["cpu_s"]) + 1,
        resource.RLIMIT_AS: job["memory_mib"] * _MIB,
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
    drop_capabilities()
    forbid_new_privileges()
    if level >= 1:
        restrict(rules)
        install_filter()

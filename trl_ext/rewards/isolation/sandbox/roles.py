"""The code that a process of the sandbox runs once its limits stand: program, candidate, or tests of a candidate."""

import atexit
import builtins
import importlib
import io
import json
import os
import random
import sys
import threading
import types
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.sandbox import pytest_names
from trl_ext.rewards.isolation.sandbox.channel import ALL_OPERATIONS, CALLS_ONLY, Channel, ChannelLost, printable

CHANNEL, REPORT, NOTE = 3, 4, 5  # descriptors: the conversation, the judge's report, what ended the code


def run_to_end(role: str, source: bytes) -> None:
    """Run a role and end the process as Python would: threads joined, exit functions called, output flushed.

    But without clearing the interpreter away, which takes longer than most programs do.
    """
    code = outcome_of(ROLES[role], source)
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush):  # type: ignore[attr-defined]
        code = outcome_of(last) or code
    os._exit(code)


def outcome_of(function: Any, *arguments: Any) -> int:
    """The exit code of a process that does this; a note of what ended it, for people."""
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
    """Run code that defines something, and then let the tests use it. It sees arguments, never an expected value."""
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    main = main_module()
    with suppress(SystemExit):  # A script's last line; what stands above it is defined.
        exec(compile(source, "answer.py", "exec"), main.__dict__)
    Channel(CHANNEL, CHANNEL, ALL_OPERATIONS, main.__dict__).serve()


def main_module() -> types.ModuleType:
    """A new module `__main__`, and the built-ins that the interpreter leaves out without its `site`."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = ["answer.py"]
    random.seed(0)  # Same code, same verdict: a fork would else seed itself from the machine.
    return main


def run_judge(source: bytes) -> None:
    """Run the steps of a test against the candidate on the other end of the channel, and report.

    Args:
        source: JSON with the fields of `Suite`, and `all`, whether to go on behind a failed test.

    The report is JSON: the number of tests passed, what failed first, and whether that is the tests' own fault, which
    an import is, and a setup: the candidate has no part in them.
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
    """Run a step; the text of what went wrong, empty where nothing did."""
    try:
        exec(compile(text, "tests", "exec"), scope)
    except BaseException as error:
        return f"{type(error).__name__}: {printable(error)}".removesuffix(": ")
    return "the code under test has ended" if channel.lost else ""


def test_scope(job: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The names that the tests use and do not define: Python's own, and those of `names`, from the candidate alone.

    What it lacks stays undefined, and fails where it is used: a built-in under test is none of Python's then.
    """
    sys.modules["pytest"], sys.modules["solution"] = pytest_names, types.ModuleType("solution")
    # Neither `__all__` nor `__path__` of the candidate's making: they would bring built-ins, and files as modules.
    vars(sys.modules["solution"]).update(__getattr__=channel.look_up, __all__=(), __path__=())
    own = {name: thing for name, thing in vars(builtins).items() if name not in job["names"]}
    scope = {"__name__": "tests", "__builtins__": own}
    scope |= {name: importlib.import_module(name) for name in job["modules"]}
    for name, theirs in job["names"].items():
        with suppress(AttributeError):
            scope[name] = channel.look_up(theirs)
    return scope


ROLES = {"program": run_program, "candidate": run_candidate, "judge": run_judge}

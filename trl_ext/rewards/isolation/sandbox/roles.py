"""The code of a confined process of the sandbox: program, candidate, or tests of a candidate."""

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

CHANNEL, REPORT, NOTE = 3, 4, 5  # descriptors: the channel, the judge's report, the code's exception


def run_to_end(role: str, source: bytes) -> None:
    """Run a role and end the process as Python would: threads joined, exit functions called, output flushed.

    The interpreter's memory is not freed first: that takes longer than most programs.
    """
    code = outcome_of(ROLES[role], source)
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush):  # type: ignore[attr-defined]
        code = outcome_of(last) or code
    os._exit(code)


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

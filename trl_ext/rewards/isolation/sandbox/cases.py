"""Inputs with outputs, or calls with results, as the tests of a code row; `suite` reads assert statements."""

import base64
import json
import pickletools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

_SHAPES = {
    "stdio": 'a list of {"input": text, "output": text}, or {"inputs": [...], "outputs": [...]}, also with "fn_name"',
    "asserts": "assert statements, as text or as a list of texts",
}
# Keys of the datasets' tests: APPS and TACO have "fn_name", LiveCodeBench "testtype", DeepCoder also "metadata";
# CodeContests' lists are "input" and "output", SYNTHETIC-1 has its list in "test_cases".
_LIST_KEYS = {"inputs", "outputs", "input", "output", "fn_name"}
_CASE_KEYS = {"input", "output", "fn_name", "testtype", "type", "metadata"}
_KINDS = {"stdin": False, "stdio": False, "stdin_stdout": False, "functional": True, "function_call": True}
# How zlib's data begins in base64; the largest unpacked size; the instructions around a pickle of one text.
_PACKED, _MOST_UNPACKED_MB = ("eA", "eF", "eJ", "eN"), 100
_AROUND_A_TEXT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


class UnreadableTests(ValueError):
    """A tests column's cell does not have the form that its mode needs; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a program: its input, and its expected output.

    `expected` is the text to print, or a tuple of the values that a call may return. The `stdin` of a call is the JSON
    list of its arguments.
    """

    stdin: str
    expected: Any


@dataclass(frozen=True, slots=True)
class Cases:
    """The cases of a row; `function` is the function that they call, None if the program reads and prints."""

    cases: tuple[Case, ...]
    function: str | None = None


def cell_text(cell: Any) -> str:
    """Return the cell as text that is equal for equal cells: unchanged, or as JSON."""
    if isinstance(cell, str):
        return cell
    try:
        return json.dumps(cell, default=repr)
    except (TypeError, ValueError, RecursionError):  # Keys that are no text; a list in itself. No tests either way.
        return repr(cell)


def first_text(cell: Any) -> str | None:
    """Return the cell's text, or the first of a list of texts, which may be JSON; None without a text."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            pass
    texts = cell if isinstance(cell, list | tuple) else [cell]
    return next((text for text in texts if isinstance(text, str) and text.strip()), None)


def function_name(cell: Any) -> str | None:
    """Return the function's name in a cell: the cell, or "func_name" or "fn_name" of its JSON; None without a name."""
    if isinstance(cell, str) and cell.lstrip().startswith("{"):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    if isinstance(cell, Mapping):
        cell = cell.get("func_name") or cell.get("fn_name")
    return cell if isinstance(cell, str) and cell else None


@lru_cache(maxsize=64)  # The completions of a GRPO group share their tests, of up to 100 MB a row.
def read_cases(text: str, entry_point: str | None = None) -> Cases:
    """Read the cases in a cell's text; UnreadableTests if there are none, or if a key is unknown.

    Example:
        >>> read_cases('[{"input": "1 2", "output": "3"}]').cases
        (Case(stdin='1 2', expected='3'),)
        >>> read_cases('{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}').cases
        (Case(stdin='[1, 2]', expected=([3], 3)),)
    """
    cell = _parse(_unpack(text) if text.startswith(_PACKED) else text, "stdio")
    if isinstance(cell, Mapping) and "test_cases" in cell and cell.get("language", "python") == "python":
        cell = _parse(cell_text(cell["test_cases"]), "stdio")
    pairs = _pair_sides(cell)
    calls, function = _kind_of(cell, entry_point)
    if not calls:
        cases = [Case(_join_lines(given), _join_lines(wanted)) for given, wanted in pairs]
        if not all(isinstance(case.stdin, str) and isinstance(case.expected, str) for case in cases):
            raise unreadable("stdio", cell)
        return Cases(tuple(cases))
    if function is None or not function.isidentifier():
        raise UnreadableTests(f"the tests call a function, and {function!r} is no function's name; give entry_point")
    return Cases(tuple(_call(given, wanted) for given, wanted in pairs), function)


def _pair_sides(cell: Any) -> list[tuple[Any, Any]]:
    """Return each case's input and expected output as they are in the cell."""
    if isinstance(cell, Mapping):
        _check_keys(cell, _LIST_KEYS)
        inputs, outputs = cell.get("inputs", cell.get("input")), cell.get("outputs", cell.get("output"))
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            return list(zip(inputs, outputs, strict=True))
    elif isinstance(cell, list) and cell and all(isinstance(case, Mapping) for case in cell):
        return [(case.get("input"), case.get("output")) for case in cell]
    raise unreadable("stdio", cell)


def _join_lines(side: Any) -> Any:
    """Join an input or output that is a list of lines; return any other value unchanged."""
    return "\n".join(side) if are_texts(side) else side


def _kind_of(cell: Any, entry_point: str | None) -> tuple[bool, str | None]:
    """Return True and the function's name if the cases are calls; all cases of a list must agree."""
    if isinstance(cell, Mapping):
        function = function_name(cell) or entry_point
        return function is not None, function
    kinds, names = set(), set()
    for case in cell:
        _check_keys(case, _CASE_KEYS)
        name = function_name(case) or function_name(case.get("metadata")) or entry_point
        kind = case.get("testtype", case.get("type"))
        if kind is not None and kind not in _KINDS:
            raise UnreadableTests(f"a test is of type {kind!r}, which is none of {', '.join(_KINDS)}")
        kinds.add(name is not None if kind is None else _KINDS[kind])
        names.add(name)
    if len(kinds) != 1 or len(names) != 1:
        raise UnreadableTests("the tests of one row are of several types, or call several functions")
    return kinds.pop(), names.pop()


def _call(given: Any, wanted: Any) -> Case:
    """Return a call's arguments and the values that it may return.

    A text holds one argument a line in JSON (LiveCodeBench). A list holds the arguments (APPS, TACO); the result may
    be in a list of length 1.
    """
    try:
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            return Case(json.dumps(arguments), (json.loads(wanted) if isinstance(wanted, str) else wanted,))
        if not isinstance(given, list):
            raise UnreadableTests(f"the arguments {repr(given)[:80]} are neither a list nor lines of JSON")
        inner = (wanted[0],) if isinstance(wanted, list) and len(wanted) == 1 else ()
        return Case(json.dumps(given), (wanted, *inner))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableTests(f"arguments or result of a call are no JSON: {repr(given)[:80]}") from error


# Runs the code in a module with the names that LeetCode gives its solutions; prints the result on the last line.
_CALLING = """
import json, sys, types
answer = sys.modules["answer"] = types.ModuleType("answer")
exec({names}, answer.__dict__)
arguments = json.loads(sys.stdin.read())
try:
    exec(compile({code}, "answer.py", "exec"), answer.__dict__)
except SystemExit:
    pass
owner = answer.Solution() if hasattr(getattr(answer, "Solution", None), {name}) else answer
arguments = [
    {{int(key): value for key, value in argument.items()}}
    if isinstance(argument, dict) and all(key.lstrip("-").isdecimal() for key in argument) else argument
    for argument in arguments
]
sys.stdout.write("\\n" + json.dumps(getattr(owner, {name})(*arguments), default=lambda value: value.tolist()) + "\\n")
"""
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator builtins "
    "typing"
)
_NAMES = "".join(f"from {module} import *\n" for module in _STARS.split())
_NAMES += "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
_NAMES += "sys.setrecursionlimit(50_000)\n"


def calling(source: bytes, name: str) -> bytes:
    """Return a program that calls a function of the code, or a method of its class `Solution`.

    The input is a JSON list of the arguments; the last line of the output is the result as JSON. The block of
    `if __name__ == "__main__"` does not run.
    """
    code = repr(source.decode("utf-8", "surrogatepass"))
    return _CALLING.format(names=repr(_NAMES), code=code, name=repr(name)).encode()


def _check_keys(cell: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(map(str, cell.keys() - known))
    if unknown:
        raise UnreadableTests(f"a test has the key {unknown[0]!r}, which is none of {', '.join(sorted(known))}")


def _parse(text: str, mode: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(mode, text) from error


def _unpack(text: str) -> str:
    """Return the text in LiveCodeBench's private tests: a pickle of it, compressed by zlib, in base64.

    A pickle is an untrusted program: it is never run, only its instructions are read, which must hold one text.
    """
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text, validate=True), _MOST_UNPACKED_MB * 10**6)
        if not unzip.eof:
            raise ValueError(f"they are cut off, or more than {_MOST_UNPACKED_MB} MB")
        steps = [(step.name, value) for step, value, _ in islice(pickletools.genops(data), 8)]
        texts = [value for name, value in steps if name not in _AROUND_A_TEXT]
        if steps[-1][0] != "STOP" or len(texts) != 1 or not isinstance(texts[0], str):
            raise ValueError("they are a pickle of something else than one text")
    except (ValueError, zlib.error) as error:
        raise UnreadableTests(f"packed tests are not opened: {error}"[:200]) from error
    return texts[0]


def are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def unreadable(mode: str, cell: Any) -> UnreadableTests:
    return UnreadableTests(f"{repr(cell)[:80]} is not {_SHAPES[mode]}")

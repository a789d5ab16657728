"""The tests column of a code row: inputs with outputs, or assert statements."""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_SHAPES = {
    "stdio": 'a list of {"input": text, "output": text}, or {"inputs": [...], "outputs": [...]}',
    "asserts": "assert statements, as text or as a list of texts",
}


class UnreadableTests(ValueError):
    """A tests column's cell is not what its mode asks for; the message says how."""


@dataclass(frozen=True, slots=True)
class StdioCase:
    """One run of a program: what it reads, and what it has to print."""

    stdin: str
    expected: tuple[str, ...]  # lines, see `lines_of`


@dataclass(frozen=True, slots=True)
class Suite:
    """Statements to run against a candidate, in order; each with its kind: "import", "prepare" or "test"."""

    steps: tuple[tuple[str, str], ...]

    @property
    def num_tests(self) -> int:
        """Statements that are tests."""
        return sum(kind == "test" for _, kind in self.steps)


def cell_text(cell: Any) -> str:
    """The cell as text that is equal for equal cells: itself, or JSON of what a dataset may hold."""
    if isinstance(cell, str):
        return cell
    try:
        return json.dumps(cell, default=repr)
    except (TypeError, ValueError, RecursionError):  # Keys that are no text; a list in itself. No tests either way.
        return repr(cell)


def first_text(cell: Any) -> str | None:
    """The cell's text, or the first of a list of texts, which may be JSON; None for anything else, and blank texts."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            pass
    texts = cell if isinstance(cell, list | tuple) else [cell]
    return next((text for text in texts if isinstance(text, str) and text.strip()), None)


@lru_cache(maxsize=1024)  # The completions of a GRPO group share their tests.
def read_cases(text: str) -> tuple[StdioCase, ...]:
    """The cases in a cell's text; UnreadableTests where there are none.

    Example:
        >>> read_cases('[{"input": "1 2", "output": "3"}]')
        (StdioCase(stdin='1 2', expected=('3',)),)
    """
    cell = _parsed(text, "stdio")
    inputs: Any
    outputs: Any
    if isinstance(cell, Mapping):
        inputs, outputs = cell.get("inputs"), cell.get("outputs")
    elif isinstance(cell, list) and all(isinstance(case, Mapping) for case in cell):
        inputs, outputs = [case.get("input") for case in cell], [case.get("output") for case in cell]
    else:
        raise _unreadable("stdio", cell)
    if not _texts(inputs) or not _texts(outputs) or len(inputs) != len(outputs):
        raise _unreadable("stdio", cell)
    return tuple(StdioCase(stdin, lines_of(output)) for stdin, output in zip(inputs, outputs, strict=True))


@lru_cache(maxsize=1024)
def read_suite(text: str, entry_point: str | None) -> Suite:
    """The steps in a cell's text; UnreadableTests where it has no test or does not parse.

    Every assert statement of the outermost level is a test. Where the text defines a function `check`, and an entry
    point is known, `check(candidate)` is one too.
    """
    steps: list[tuple[str, str]] = []
    for block in _blocks(text):
        try:
            nodes = ast.parse(block).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UnreadableTests(f"the tests do not parse: {error}") from error
        steps += [(ast.unparse(node), _kind(node)) for node in nodes]
        if entry_point and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
            steps.append(("check(candidate)", "test"))
    suite = Suite(tuple(steps))
    if not suite.num_tests:
        raise UnreadableTests("the tests hold no assert statement, and no check() with a column for its entry point")
    return suite


def _kind(node: ast.stmt) -> str:
    if isinstance(node, ast.Assert):
        return "test"
    return "import" if isinstance(node, ast.Import | ast.ImportFrom) else "prepare"


def lines_of(output: str) -> tuple[str, ...]:
    """The lines of an output without their trailing white space, and without empty lines at the end."""
    return tuple(line.rstrip() for line in output.rstrip().split("\n"))


def _blocks(text: str) -> list[str]:
    """Texts of Python: a JSON list's items, or the text itself."""
    if text.lstrip().startswith("["):
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        if not _texts(cell):
            raise _unreadable("asserts", cell)
        return cell
    return [text]


def _parsed(text: str, mode: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(mode, text) from error


def _texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _unreadable(mode: str, cell: Any) -> UnreadableTests:
    return UnreadableTests(f"{repr(cell)[:80]} is not {_SHAPES[mode]}")

"""The tests column of a code row: inputs with outputs, calls with results, or assert statements."""

import ast
import base64
import builtins
import json
import pickletools
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from trl_ext.rewards.isolation.sandbox import pytest_names

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


@dataclass(frozen=True, slots=True)
class Suite:
    """Statements to run against a candidate, in order; each with its kind: "setup", "import", "prepare" or "test".

    A setup step does not use the candidate: if it fails, the data is at fault. `names` maps the names that the tests
    take from the candidate to its names for them; `modules` are the standard modules that the tests use.
    """

    steps: tuple[tuple[str, str], ...]
    names: Mapping[str, str]
    modules: tuple[str, ...]

    @property
    def num_tests(self) -> int:
        return sum(kind == "test" for _, kind in self.steps)


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
            raise _unreadable("stdio", cell)
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
    raise _unreadable("stdio", cell)


def _join_lines(side: Any) -> Any:
    """Join an input or output that is a list of lines; return any other value unchanged."""
    return "\n".join(side) if _texts(side) else side


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


@lru_cache(maxsize=1024)
def read_suite(text: str, entry_point: str | None, setup: str = "") -> Suite:
    """Read the steps in a cell's text; UnreadableTests if it has no test, does not parse, or lacks a name.

    Tests are outermost statements that assert something, directly or by a function of the tests; functions `test_...`
    without arguments (pytest); and such methods of classes `Test...` and of unittest's TestCases. If the text defines
    a function `check` and an entry point is known, `check(candidate)` is a test, too. The block of
    `if __name__ == "__main__"` is read if there are no other tests. With an entry point, or an import from `solution`,
    the tests or `setup` must define all other names: the candidate's definitions would decide about its verdict.

    Args:
        setup: Python that runs before the tests, in their process, and defines names for them. Its version of the
            entry point is left out.
    """
    trees = [_tree(block, "the tests") for block in _blocks(text)]
    prepared = [
        node for node in _tree(setup, "the setup") if not entry_point or getattr(node, "name", "") != entry_point
    ]
    asserting = _asserting([*chain.from_iterable(trees), *prepared])
    steps = _steps(trees, asserting, entry_point)
    if not _has_test(steps):
        trees = [list(chain.from_iterable(map(_open, nodes))) for nodes in trees]
        steps = _steps(trees, asserting, entry_point)
    if not _has_test(steps):
        raise UnreadableTests("the tests hold no assert statement, and no check() with a column for its entry point")
    kind = "prepare" if _unbound(prepared) else "setup"
    steps = [(ast.unparse(node), kind) for node in prepared] + steps
    every_node = [*chain.from_iterable(trees), *prepared]
    names = _Names.of(every_node)
    return Suite(
        steps=tuple(steps),
        names=_taken(names, _unbound(every_node), entry_point),
        modules=tuple(sorted(names.modules)),
    )


def _has_test(steps: list[tuple[str, str]]) -> bool:
    return any(kind == "test" for _, kind in steps)


def _steps(trees: list[list[ast.stmt]], asserting: set[str], entry_point: str | None) -> list[tuple[str, str]]:
    """Return the statements of the tests with their kinds; calls of the tests that a text defines follow it."""
    steps: list[tuple[str, str]] = []
    for nodes in trees:
        steps += [(ast.unparse(node), _kind(node, asserting)) for node in nodes]
        functions = _functions(nodes)
        steps += [("check(candidate)", "test")] * bool(entry_point and "check" in functions)
        steps += _calls(functions, "", 0, has_others=any(isinstance(node, ast.Assert) for node in nodes))
        cases: dict[str, dict[str, _Function]] = {"TestCase": {}, "IsolatedAsyncioTestCase": {}}
        for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
            bases = [cases[name] for base in node.bases if (name := _last_name(base)) in cases]
            methods = _functions(node.body)
            if bases:
                cases[node.name] = methods = {name: one for own in (*bases, methods) for name, one in own.items()}
                steps += [(f"{node.name}.setUpClass()", "prepare")] * ("setUpClass" in methods)
                steps += [(f"{node.name}({name!r}).debug()", "test") for name in methods if name.startswith("test")]
            elif node.name.startswith("Test"):
                given = len(methods["setup_method"].args.args) if "setup_method" in methods else 0
                setup = f"_one.setup_method({'None' * (given > 1)})\n" * (given > 0)
                steps += _calls(methods, f"_one = {node.name}()\n{setup}_one.", 1, has_others=False)
    return steps


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(nodes: list[ast.stmt]) -> dict[str, _Function]:
    return {node.name: node for node in nodes if isinstance(node, _Function)}


def _calls(functions: dict[str, _Function], before: str, bound: int, has_others: bool) -> list[tuple[str, str]]:
    """Return steps that call functions `test_...`.

    Raises UnreadableTests if a function has arguments and no other test is left.

    Args:
        functions: Functions or methods by name.
        before: Source that precedes a call; its last line is the beginning of the calling line.
        bound: Parameters that Python passes itself: 1 for methods, else 0.
        has_others: Whether the suite has other tests.
    """
    steps = []
    for node in (functions[name] for name in functions if name.startswith("test_")):
        if len(node.args.args) - len(node.args.defaults) <= bound:
            run = "__import__('asyncio').run" * isinstance(node, ast.AsyncFunctionDef)
            lines, _, owner = before.rpartition("\n")
            steps.append((f"{lines}\n{run}({owner}{node.name}())", "test"))
        elif not has_others:
            raise UnreadableTests(f"{node.name} takes arguments, which only pytest would give")
    return steps


def _open(node: ast.stmt) -> list[ast.stmt]:
    """Return the statement, or the block of `if __name__ == "__main__"`."""
    return node.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) else [node]


def _asserting(nodes: list[ast.stmt]) -> set[str]:
    """Return the names of the functions that assert something, directly or by a call of such a function."""
    defined = [inner for outer in nodes for inner in ast.walk(outer) if isinstance(inner, _Function)]
    found: set[str] = set()
    while more := {node.name for node in defined if node.name not in found and _asserts(node, found)}:
        found |= more
    return found


def _asserts(node: ast.AST, asserting: set[str]) -> bool:
    for inner in ast.walk(node):
        name = _last_name(inner.func) if isinstance(inner, ast.Call) else ""
        raised = ast.unparse(inner) if isinstance(inner, ast.Raise) else ""
        named = name in asserting or name == "raises" or name.startswith("assert")
        if named or isinstance(inner, ast.Assert) or "AssertionError" in raised:
            return True
    return False


def _last_name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@dataclass(frozen=True, slots=True)
class _Names:
    """Names in the source of tests.

    Args:
        read: Names that are read.
        called: Names that are called.
        modules: Names of standard modules, each use followed by a dot: `select(3)` is the candidate's function.
        of_pytest: Attributes that are read of `pytest`; "" for the module without a dot.
        from_solution: Names that are imported from the module `solution`; "*" for all.
        has_star: Whether there is an import of all names.
    """

    read: frozenset[str]
    called: frozenset[str]
    modules: frozenset[str]
    of_pytest: frozenset[str]
    from_solution: frozenset[str]
    has_star: bool

    @classmethod
    def of(cls, nodes: list[ast.stmt]) -> "_Names":
        inner = [node for outer in nodes for node in ast.walk(outer)]
        after_dot = {id(node.value): node.attr for node in inner if isinstance(node, ast.Attribute)}
        read, bare, called, of_pytest, from_solution = set(), set(), set(), set(), set()
        for node in inner:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                read.add(node.id)
                if id(node) not in after_dot:
                    bare.add(node.id)
                if node.id == "pytest":
                    of_pytest.add(after_dot.get(id(node), ""))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            elif isinstance(node, ast.ImportFrom) and node.module == "solution":
                from_solution |= {alias.name for alias in node.names}
        return cls(
            read=frozenset(read),
            called=frozenset(called),
            modules=frozenset(read & sys.stdlib_module_names - bare),
            of_pytest=frozenset(of_pytest),
            from_solution=frozenset(from_solution),
            has_star=any(isinstance(node, ast.alias) and node.name == "*" for node in inner),
        )


def _taken(names: _Names, unbound: set[str], entry_point: str | None) -> dict[str, str]:
    """Return the names that tests take from the candidate (see `Suite`).

    A prompt's `import math` is valid in its tests, too: the candidate's `math` could be anything. A built-in is
    Python's, whatever the candidate defines, except for the function under test: the entry point, or the single
    built-in called by tests that use nothing else (`assert sum(2, 3) == 5`).
    """
    known = {"main", *pytest_names.__all__}
    if names.of_pytest - known:
        raise UnreadableTests(f"the tests use more of pytest than {' and '.join(pytest_names.__all__)}")
    unknown = unbound - names.modules - {entry_point, "candidate"}
    if entry_point or names.from_solution - {"*"}:
        if unknown:
            some = ", ".join(sorted(unknown)[:5])
            raise UnreadableTests(f"the tests use {some}, which they do not define; name a column that does as setup")
        return dict.fromkeys(("candidate", entry_point), entry_point) if entry_point else {}
    built_in = set(dir(builtins))
    taken = names.read - names.modules - built_in
    if not unknown and not names.has_star:
        called = names.called & built_in
        if len(called) > 1:
            some = ", ".join(sorted(called))
            raise UnreadableTests(f"the tests use only built-ins ({some}); name the one under test as entry_point")
        taken |= called
    return {name: name for name in sorted(taken)}


def _unbound(nodes: list[ast.stmt]) -> set[str]:
    """Return the names that the statements read and that neither they nor Python's built-ins define."""
    read: set[str] = set()
    bound = {"__name__"}
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return set()  # It may define any name.
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
    return read - bound - set(dir(builtins))


def _tree(source: str, owner: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTests(f"{owner} do not parse: {error}".replace("setup do", "setup does")) from error


def _kind(node: ast.stmt, asserting: set[str]) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "prepare" if "solution" in ast.unparse(node).split() else "import"
    defines = isinstance(node, _Function | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign)
    return "prepare" if defines or _open(node) != [node] or not _asserts(node, asserting) else "test"


def _check_keys(cell: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(map(str, cell.keys() - known))
    if unknown:
        raise UnreadableTests(f"a test has the key {unknown[0]!r}, which is none of {', '.join(sorted(known))}")


def _blocks(text: str) -> list[str]:
    """Return texts of Python: a JSON list's items, or the text."""
    if text.lstrip().startswith("["):
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        if not _texts(cell):
            raise _unreadable("asserts", cell)
        return list(cell)
    return [text]


def _parse(text: str, mode: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(mode, text) from error


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


def _texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _unreadable(mode: str, cell: Any) -> UnreadableTests:
    return UnreadableTests(f"{repr(cell)[:80]} is not {_SHAPES[mode]}")

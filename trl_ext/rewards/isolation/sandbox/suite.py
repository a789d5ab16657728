"""Assert statements as the tests of a code row: steps to run, and the names they take from a candidate."""

import ast
import builtins
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from trl_ext.rewards.isolation.sandbox import pytest_names
from trl_ext.rewards.isolation.sandbox.cases import UnreadableTests, are_texts, unreadable


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


def _blocks(text: str) -> list[str]:
    """Return texts of Python: a JSON list's items, or the text."""
    if text.lstrip().startswith("["):
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        if not are_texts(cell):
            raise unreadable("asserts", cell)
        return list(cell)
    return [text]

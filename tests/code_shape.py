"""Counts of a package's source that tell how hard it is to read: decisions, nesting, packed calls, knots of folders.

python -m tests.code_shape             # the counts, and where the highest are
"""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "trl_ext"
DECISIONS = (ast.If, ast.For, ast.While, ast.IfExp, ast.BoolOp, ast.comprehension, ast.ExceptHandler, ast.match_case)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Places = dict[str, int]  # "folder/file.py:12 name": count


@cache
def trees() -> list[tuple[str, ast.Module]]:
    """Each file's name within the package, and its syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text())) for path in paths]


def decisions(tree: ast.AST) -> int:
    """Number of `if`s, loops, conditional expressions, chains of `and` or `or`, comprehensions and handlers."""
    return sum(isinstance(node, DECISIONS) for node in ast.walk(tree))


def decisions_by_function() -> Places:
    """Decisions of each function; an outer function has the decisions of its inner functions, too."""
    return {
        f"{name}:{node.lineno} {node.name}": decisions(node)
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }


def nested_comprehensions() -> Places:
    """Comprehensions in which another stands, by file."""
    found: Counter[str] = Counter()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS) and holds_another(node):
                found[name] += 1
    return dict(found)


def holds_another(comprehension: ast.AST) -> bool:
    """Whether a comprehension stands in this one."""
    inner = (node for child in ast.iter_child_nodes(comprehension) for node in ast.walk(child))
    return any(isinstance(node, COMPREHENSIONS) for node in inner)


def packed_calls() -> Places:
    """Calls that splat a tuple of three or more values, or a dict, which the same function has packed, by file."""
    found: set[tuple[str, int]] = set()  # file and line: a call in an inner function is in the outer one, too
    for name, tree in trees():
        for function in ast.walk(tree):
            if isinstance(function, FUNCTIONS):
                tuples, dicts = packed_names(function)
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                found |= {(name, call.lineno) for call in calls if unpacks(call, tuples, dicts)}
    return dict(Counter(name for name, _ in found))


def unpacks(call: ast.Call, tuples: set[str], dicts: set[str]) -> bool:
    """Whether a call splats one of these tuples or dicts."""
    splatted = {_name(one.value) for one in call.args if isinstance(one, ast.Starred)}
    named = {_name(one.value) for one in call.keywords if one.arg is None}
    return bool(splatted & tuples or named & dicts)


def packed_names(function: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names to which the function gives a tuple of three or more values, and a dict."""
    tuples, dicts = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            names = {_name(target) for target in node.targets} - {""}
            if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2:
                tuples |= names
            if isinstance(node.value, ast.Dict):
                dicts |= names
    return tuples, dicts


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def bare_tuples() -> Places:
    """Functions whose result is annotated as a tuple of several things, by file; `tuple[int, ...]` is a sequence."""
    found: Counter[str] = Counter()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.returns is not None:
                result = ast.unparse(node.returns)
                found[name] += result.startswith("tuple[") and not result.endswith(", ...]")
    return {name: count for name, count in found.items() if count}


def without_args() -> Places:
    """Functions of four parameters or more whose docstring has no `Args:`, by file.

    An override's docstring names the method that it overrides, which documents them.
    """
    found: Counter[str] = Counter()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and not node.name.startswith("__"):
                args = node.args
                names = {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)} - {"self", "cls"}
                doc = ast.get_docstring(node) or ""
                found[name] += len(names) >= 4 and not ("Args:" in doc or doc.startswith("Overrides"))
    return {name: count for name, count in found.items() if count}


def overridden(kind: str, base: str) -> list[str]:
    """Names of methods and properties of one class that another, or a class of the package below it, defines, too."""
    classes = {node.name: node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    inherited: set[str] = set()
    left = [base]
    while left:
        node = classes.get(left.pop())
        if node is not None:
            inherited |= _methods(node)
            left += [_name(one) for one in node.bases]
    return sorted(_methods(classes[kind]) & inherited)


def _methods(node: ast.ClassDef) -> set[str]:
    return {one.name for one in node.body if isinstance(one, FUNCTIONS)}


def exported_without_args() -> set[str]:
    """Public functions and dataclasses whose docstring does not list their parameters, as "folder/file.py name".

    A name is public if its folder, or a folder above, has it in `__all__`. Classes whose fields are made by `setting`
    or `_option` carry the text of each field there.
    """
    doors = [(name, tree) for name, tree in trees() if name.endswith("/__init__.py")]
    public = {(str(Path(name).parent), one) for name, tree in doors for one in _all_of(tree)}
    found = set()
    for name, tree in trees():
        folders = [str(folder) for folder in Path(name).parents]
        for node in tree.body:
            if any((folder, getattr(node, "name", "")) in public for folder in folders):
                if _takes_values(node) and "Args:" not in (ast.get_docstring(node) or ""):
                    found.add(f"{name} {node.name}")
    return found


def _all_of(tree: ast.Module) -> list[str]:
    """Return the names of a module's `__all__`."""
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node.targets[0]) == "__all__"]
    return [str(name) for names in lists for name in ast.literal_eval(names)]


def _takes_values(node: ast.AST) -> bool:
    """Whether this is a function with parameters, or a dataclass with fields that no text describes."""
    if isinstance(node, FUNCTIONS):
        return bool(node.args.args or node.args.kwonlyargs)
    if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return False
    values = [ast.unparse(one.value) for one in node.body if isinstance(one, ast.AnnAssign) and one.value is not None]
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return bool(fields) and not any(value.startswith(("setting(", "_option(")) for value in values)


def untyped_trainers() -> Places:
    """Parameters `trainer` of type Any, by file: mypy does not see what these functions read of it."""
    found: Counter[str] = Counter()
    for name, tree in trees():
        for node in ast.walk(tree):
            is_any = isinstance(node, ast.arg) and node.annotation is not None and _name(node.annotation) == "Any"
            found[name] += is_any and node.arg == "trainer"
    return {name: count for name, count in found.items() if count}


def knots_of_folders() -> list[set[str]]:
    """Sets of folders that import each other, over any number of steps; imports of types alone count, too.
    `__init__.py` does not count: it is a folder's door."""
    arrows: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in trees():
        if name.endswith("__init__.py"):
            continue
        here = str(Path(name).parent)
        for node in ast.walk(tree):
            for module in _imported(node):
                there = _folder_of(module)
                if there != here:
                    arrows[here].add(there)
    reached = {folder: _reached(folder, arrows) for folder in arrows}
    knots: set[frozenset[str]] = set()
    for folder, there in reached.items():
        back = {other for other in there if folder in reached.get(other, set())}
        if back - {folder}:
            knots.add(frozenset(back | {folder}))
    return [set(knot) for knot in knots]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_ext."):
        return [f"{node.module}.{one.name}" for one in node.names]
    if isinstance(node, ast.Import):
        return [one.name for one in node.names if one.name.startswith("trl_ext.")]
    return []


def _folder_of(module: str) -> str:
    """Return the folder of the file that holds `trl_ext.a.b.name`."""
    path = PACKAGE
    for part in module.split(".")[1:]:
        if not (path / part).is_dir():
            break
        path = path / part
    return str(path.relative_to(PACKAGE))


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for folder in arrows.get(left.pop(), set()) - found:
            found.add(folder)
            left.append(folder)
    return found


def main() -> None:
    """Print the counts, and where the highest are."""
    functions = decisions_by_function()
    print("decisions", sum(decisions(tree) for _, tree in trees()))
    for title, places in (
        ("decisions of a function", functions),
        ("comprehensions in comprehensions", nested_comprehensions()),
        ("packed calls", packed_calls()),
        ("functions that return a bare tuple", bare_tuples()),
        ("functions of four parameters without Args", without_args()),
        ("trainers of type Any", untyped_trainers()),
    ):
        print(title, sum(places.values()), "in", len(places))
        for name, count in sorted(places.items(), key=lambda one: -one[1])[:12]:
            print(f"  {count:3} {name}")
    print("knots of folders", knots_of_folders())


if __name__ == "__main__":
    main()

"""The doors of the house: which room of the package may import which. docs/architecture.md shows the picture."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A room and what it may import, top floor last: every arrow runs to a room above it in this table. Imports within
# functions count, too, and so do those for type checking.
DOORS: dict[str, set[str]] = {
    "errors": set(),
    "resources": {"errors"},
    "compat": {"errors"},
    "packing": {"compat", "errors"},
    "rewards": {"errors"},
    "memory": {"compat", "errors", "resources"},
    "monitor": {"errors"},
    "doctor": {"compat", "errors", "memory", "rewards"},
    "trainers": {"compat", "doctor", "errors", "memory", "monitor", "packing", "resources", "rewards"},
    "scripts": {"compat", "errors", "memory", "monitor", "resources", "rewards", "trainers"},
    "launch": {"compat", "errors", "resources", "rewards", "scripts", "trainers"},
    "cli": {"doctor", "errors", "launch", "memory", "monitor", "resources", "rewards", "scripts", "trainers"},
    # The public names: `trl_ext/__init__.py`. No room may import it.
    "trl_ext": {"compat", "memory", "resources", "rewards", "trainers"},
}


def name_of(path: Path) -> str:
    """Dotted name of the module in this file; a package's own file has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "trl_ext").rglob("*.py"))}


def room(module: str) -> str:
    """First folder or file below the package, `trl_ext` for the package itself."""
    return module.split(".")[1] if "." in module else module


@cache  # and not where tests are collected: each worker does that
def imports(module: str) -> set[str]:
    """Modules of ours that this one imports, anywhere in it, as a statement or by `import_module("...")`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports relatively; the house writes whole names"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` is an arrow to the module, `from module import name` one to the module.
            found |= {name if name in FILES else node.module for name in names}
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        ):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return (found & set(FILES)) - {module}


def test_every_room_stands_in_the_table_whose_doors_lead_down():
    assert {room(module) for module in FILES} == set(DOORS)
    floors = list(DOORS)
    for name, doors in DOORS.items():
        assert doors <= set(floors[: floors.index(name)]), name


@pytest.mark.parametrize("name", DOORS)
def test_a_room_imports_through_its_doors_only_and_uses_each(name):
    walls = [
        f"{module} imports {other}"
        for module in FILES
        if room(module) == name
        for other in sorted(imports(module))
        if room(other) not in DOORS[name] | {name}
    ]
    assert not walls, "\n".join(walls)
    used = {room(other) for module in FILES if room(module) == name for other in imports(module)}
    if name == "trl_ext":  # its names load on first use, from a table of texts
        used |= {"memory", "rewards", "trainers"}
    assert DOORS[name] <= used


def test_no_files_import_each_other_in_a_circle():
    list(
        TopologicalSorter({module: imports(module) for module in FILES}).static_order()
    )  # raises CycleError, which names the circle


def folder(module: str) -> str:
    """Folder of a module's file, below the package."""
    return str(FILES[module].parent.relative_to(ROOT / "trl_ext"))


@pytest.mark.parametrize("name", ["memory", "rewards", "trainers"])
def test_no_folders_of_a_room_import_each_other_in_a_circle(name):
    arrows: dict[str, set[str]] = {}
    for module in FILES:
        if room(module) == name and FILES[module].name != "__init__.py":  # a room's public names load from below
            others = {folder(other) for other in imports(module) if room(other) == name}
            arrows.setdefault(folder(module), set()).update(others - {folder(module)})
    list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle

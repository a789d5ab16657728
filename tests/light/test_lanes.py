"""Lanes, benchmarks and examples, which `make test` does not run, import names that exist; each lane is a command."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lanes import run_all

FOLDERS = ("tests/lanes", "tests/multi", "tests/gpu", "benchmarks", "examples")
OURS = ("tests", "trl_ext", "benchmarks")
MAKEFILE = (ROOT / "Makefile").read_text()


def file_of(module: str) -> Path | None:
    """The file of a module of ours, or the folder of a package without one; None if there is neither."""
    path = ROOT.joinpath(*module.split("."))
    places = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((place for place in places if place.exists()), None)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when a module is imported: not those in functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from statements(child)


@cache
def names_of(module: str) -> frozenset[str]:
    """Names that a module has after its import; of one with `__getattr__` all its texts, too."""
    path, found = file_of(module), set[str]()
    if path is None or path.is_dir():
        return frozenset()
    tree = ast.parse(path.read_text())
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if "__getattr__" in found:
        found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return frozenset(found)


def is_there(dotted: str) -> bool:
    """Whether there is a module of ours by this name, or a module and in it a name."""
    module, _, name = dotted.rpartition(".")
    return bool(file_of(dotted) or name in names_of(module) or name.startswith("__"))


def is_ours(dotted: str | None) -> bool:
    return (dotted or "").split(".")[0] in OURS


def asked_of(source: str) -> set[str]:
    """Dotted names of ours that a file imports, reads of a module that it imports, or has as a text."""
    tree, asked, modules = ast.parse(source), set[str](), {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_ours(node.module):
            for alias in node.names:
                asked.add(f"{node.module}.{alias.name}")
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            asked |= {alias.name for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"({'|'.join(OURS)})(\.\w+){{2,}}", str(node.value)):
            asked.add(str(node.value))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    modules = {name: module for name, module in modules.items() if file_of(module) and name not in bound}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            asked.add(f"{modules[node.value.id]}.{node.attr}")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr"):
            owner, name = (*node.args, None, None)[:2]
            if isinstance(owner, ast.Name) and owner.id in modules and isinstance(name, ast.Constant):
                asked.add(f"{modules[owner.id]}.{name.value}")
    return asked


def missing_in(source: str) -> set[str]:
    return {dotted for dotted in asked_of(source) if not is_there(dotted)}


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from trl_ext.launch.servers import free_ports", set()),
        ("from trl_ext.launch.servers import _free_ports", {"trl_ext.launch.servers._free_ports"}),
        ("from trl_ext.launch import servers; servers._free_ports(1)", {"trl_ext.launch.servers._free_ports"}),
        ("from tests import tiny; monkeypatch.setattr(tiny, 'WORDS', 1)", {"tests.tiny.WORDS"}),
        ("run('-m', 'tests.lanes.vllm.train', 'tests.lanes.vllm.trains')", {"tests.lanes.vllm.trains"}),
        ("from trl_ext import GRPOTrainer, GRPOTrainers", {"trl_ext.GRPOTrainers"}),
        ("import benchmarks.gpu.wheels, benchmarks.gpu.wheel", {"benchmarks.gpu.wheel"}),
    ],
)
def test_a_renamed_name_is_found(line, missing):
    assert missing_in(line) == missing


@pytest.mark.slow
def test_what_make_test_does_not_run_asks_for_names_that_exist():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): missing_in(path.read_text()) for path in files}
    assert len(files) > 100 and not {name: missing for name, missing in found.items() if missing}


def recipe_of(target: str) -> str:
    """The lines that a target of the Makefile runs."""
    found = re.search(rf"^[\w -]*\b{target}\b[\w -]*:[^=\n]*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, f"no target {target}"
    return found[1]


@pytest.mark.parametrize("lane", run_all.LANES)
def test_a_lane_is_a_target_of_existing_paths_and_has_a_line_on_its_page(lane):
    recipe = recipe_of(lane)
    paths = re.findall(r"(?<![\w/.-])(?:tests|benchmarks)/[\w/.]+", recipe)
    modules = re.findall(r"-m ((?:tests|benchmarks)[\w.]+)", recipe)
    assert paths or modules
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert not [module for module in modules if not file_of(module)]
    assert f"`make {lane}" in (ROOT / "docs/reference/lanes.md").read_text()
    assert lane in re.search(r"^\.PHONY:(.*)$", MAKEFILE.replace("\\\n", " "), re.MULTILINE)[1].split()


def test_each_file_of_tests_is_of_a_lane():
    recipes = "".join(recipe_of(lane) for lane in run_all.LANES)
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests/lanes").rglob("test_*.py")]
    homeless = [str(path) for path in tests if not any(str(place) in recipes for place in [path, *path.parents[:-3]])]
    assert tests and not homeless


def test_the_page_shows_the_results_that_are_kept():
    text = run_all.PAGE.read_text()
    assert text == run_all.page_with(text, json.loads(run_all.RESULTS.read_text()))


PRINTED = """
grpo: 3 draws from seed 0: 3 close
====== 3 passed, 1 skipped in 12.34s ======
============ 1 failed, 2 passed, 1 warning in 75.00s (0:01:15) ============
"""


def test_counts_of_several_runs_of_pytest_are_summed():
    found = run_all.result_of(PRINTED)
    assert found["counts"] == {"passed": 5, "skipped": 1, "failed": 1}
    assert found["words"] == ["grpo: 3 draws from seed 0: 3 close"]


def test_lanes_that_fail_do_not_stop_the_others_and_only_rows_of_the_asked_change(tmp_path, monkeypatch, capsys):
    (tmp_path / "Makefile").write_text("fsdp2:\n\t@echo '=== 2 failed in 1.00s ==='; exit 3\nvllm:\n\t@exit 0\n")
    page = tmp_path / "page.md"
    page.write_text(f"above\n{run_all.BEGIN}{run_all.END}below\n")
    for name, value in {"ROOT": tmp_path, "RESULTS": tmp_path / "kept.json", "PAGE": page, "LOGS": tmp_path}.items():
        monkeypatch.setattr(run_all, name, value)
    monkeypatch.setattr(run_all, "commit", lambda: "1234abcd")
    monkeypatch.setattr(run_all, "versions_of", lambda lane: {"trl": "1.16.0"})
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("BASE", "5678abcd")  # another lane's
    assert run_all.main("fsdp2", "vllm") == 1
    fsdp2 = json.loads(run_all.RESULTS.read_text())["fsdp2"]
    assert (fsdp2["exit"], fsdp2["counts"], fsdp2["commit"]) == (2, {"failed": 2}, "1234abcd")
    assert run_all.main("vllm") == 0
    kept = json.loads(run_all.RESULTS.read_text())
    assert kept["fsdp2"] == fsdp2 and kept["vllm"]["exit"] == 0
    assert page.read_text().startswith("above\n") and page.read_text().endswith("below\n")
    assert "| `make fsdp2` | **failed** | 2 failed | `1234abcd`" in page.read_text()
    assert run_all.main("no-lane") == 2
    assert "1 of 2 lanes passed; failed: fsdp2" in capsys.readouterr().out

"""The tests for cards run where `tests/*.py`, `tests/gpu` and the package are all there is."""

import ast

from tests.conftest import ROOT

TESTS = ROOT / "tests"


def imports(path) -> set[str]:
    """Modules below `tests` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
            found |= {f"tests.{name.name}" for name in node.names} if node.module == "tests" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("tests.")}
    return found


def test_tests_for_cards_import_helpers_alone_and_so_do_these():
    looked_at, waiting = set(), sorted((TESTS / "gpu").glob("*.py"))
    while waiting:
        path = waiting.pop()
        looked_at.add(path)
        for module in imports(path):
            file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            assert file.parent in (TESTS, TESTS / "gpu"), f"{path.name} imports {module}"
            assert file.is_file() and not file.name.startswith("test_"), f"{path.name} imports {module}"
            waiting += [file] if file not in looked_at else []
    assert TESTS / "grpo_trainers.py" in looked_at

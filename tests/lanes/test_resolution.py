"""`make resolve`: uv finds versions for sets of extras on each Python, for vLLM those that `trl-ext doctor` prints."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from trl_ext.compat.versions import RESOLVED_WITH_VLLM, SUPPORTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
EXTRAS = ["", "rules", "vllm", "vllm rules deepspeed math", "ray", "dev"]
PATIENCE_S = 300
UV = shutil.which("uv", path=str(Path(sys.executable).parent))


def resolved(extras: str, python: str) -> dict[str, str]:
    """The version of each package that uv chooses."""
    words = [f"--extra={extra}" for extra in extras.split()]
    command = [UV, "pip", "compile", "pyproject.toml", *words, "--python-version", python, "--no-header"]
    command += ["--no-annotate", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", done.stdout, re.MULTILINE))


def test_the_sets_are_of_extras_and_of_supported_pythons():
    assert {extra for extras in EXTRAS for extra in extras.split()} <= set(PROJECT["optional-dependencies"])
    assert len(PYTHONS) == 3 and all(python in SpecifierSet(PROJECT["requires-python"]) for python in PYTHONS)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extras", EXTRAS)
def test_versions_are_found_within_our_windows(extras, python, capsys):
    found = resolved(extras, python)
    for package, (low, high) in SUPPORTED.items():
        window = SpecifierSet(f">={low}" + (f",<{high}" if high else ""))
        assert window.contains(found[package]), (package, found[package])
    if "vllm" in extras:
        assert {package: found[package] for package in RESOLVED_WITH_VLLM} == RESOLVED_WITH_VLLM
    with capsys.disabled():
        names = [name for name in ("torch", "transformers", "trl", "vllm") if name in found]
        chosen = ", ".join(f"{name} {found[name]}" for name in names)
        print(f"\n[{extras}] on Python {python}: {chosen}")

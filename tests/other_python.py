"""A Python that has packages which this environment lacks, and all else that this one has."""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest


def python_with(packages: list[str], variable: str, folder: Path) -> str:
    """Return the Python that the variable names; else, in nightly runs, one made in the folder; else skip the test."""
    if python := os.environ.get(variable):
        return python
    if not os.environ.get("TRL_EXT_THOROUGH"):
        pytest.skip(f"This environment lacks {', '.join(packages)}, and {variable} names no Python that has them.")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(packages)}: {done.stderr[-300:]}")
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "zz_beside.pth").write_text(sysconfig.get_path("purelib"))  # behind its own packages
    return python

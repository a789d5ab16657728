"""Short runs end with the same weights, to the bit, as at another commit: for changes that mean to change nothing.

    make same-weights               # against the commit of this lane's last result
    make same-weights BASE=HEAD     # what is not committed, against the last commit

`runs.py` lists the runs. A run that differs on purpose is named in the commit; the lane then runs with that commit as
BASE.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes.run_all import RESULTS
from tests.multi.launching import ENVIRONMENT, ROOT

RUNS = Path(__file__).with_name("runs.py")
LEAST = 25


def base() -> str:
    """The commit to compare with: BASE, else the commit of the last result, else the commit before this one."""
    last = json.loads(RESULTS.read_text(encoding="utf-8")).get("same-weights", {}).get("commit", "HEAD~1")
    return os.environ.get("BASE") or last.removesuffix("+")


def git(*words: str | Path) -> None:
    subprocess.run(["git", *map(str, words)], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """The files of the other commit."""
    git("worktree", "add", "--detach", tmp_path / "base", base())
    yield tmp_path / "base"
    git("worktree", "remove", "--force", tmp_path / "base")


def weights(root: Path, out: Path) -> dict[str, str]:
    """SHA-256 of the weights by run, with the code of a checkout."""
    found: dict[str, str] = {}
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2"]
    launcher += ["--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
    for words in ([], launcher):
        command = [sys.executable, *words, str(RUNS), str(out)]
        done = subprocess.run(
            command, env=ENVIRONMENT | {"PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found |= json.loads(out.read_text(encoding="utf-8"))
    return found


def test_weights_are_equal_to_the_bit(checkout, tmp_path):
    before, after = weights(checkout, tmp_path / "before.json"), weights(ROOT, tmp_path / "after.json")
    assert len(after) >= LEAST
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == set()

"""Runs TRL's own GRPO and reward tests with our classes in the place of TRL's, beside the stock run.

    python -m tests.lanes.trl_suite.run CHECKOUT [FOLDER] [arguments of pytest]

CHECKOUT is one of TRL, of whatever version; its tests run on the TRL that is installed, so that some fail with TRL's
classes too: these say nothing about ours. Nothing is fetched, and nothing of TRL is kept but in FOLDER. A second call
goes on where a stopped one was. Exit code 1: a test that passes with TRL's classes fails with ours, and `DECIDED` does
not say why.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lanes.trl_suite.compare import report

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
TESTS = ("tests/test_reward_trainer.py", "tests/test_grpo_trainer.py")
LIMIT_S = 600  # of one test


def run_arm(arm: str, folder: Path, arguments: list[str]) -> Path:
    """Run the tests with the classes of one library; return the file of records."""
    records = folder / f"{arm}.jsonl"
    own = {
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TRL_EXT_REPORT": "0",
        "TRL_SUITE_ARM": arm,
        "TRL_SUITE_RECORDS": str(records),
        "TRL_SUITE_STANDINS": str(folder),
    }
    limits = ["-o", f"faulthandler_timeout={LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"]
    plugins = ["-p", "plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--rootdir", ".", *plugins, *limits, *arguments]
    with (folder / f"{arm}.log").open("a") as log:
        subprocess.run(command, cwd=folder / "source", env=os.environ | own, stdout=log, stderr=log, check=False)
    return records


def main(checkout: str, folder: str = "out/trl-suite", *arguments: str) -> int:
    source, work = Path(checkout).resolve(), Path(folder).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "made").exists():
        for part in (
            "tests",
            "scripts",
            "docs/source",
            "pyproject.toml",
        ):  # without TRL itself: the installed one runs
            copy = shutil.copytree if (source / part).is_dir() else shutil.copy
            (work / "source" / part).parent.mkdir(parents=True, exist_ok=True)
            copy(source / part, work / "source" / part)
        subprocess.run([sys.executable, HERE / "standins.py", work / "source", work], check=True)
    asked = list(arguments) or list(TESTS)
    with ThreadPoolExecutor() as pool:
        stock, own = pool.map(lambda arm: run_arm(arm, work, asked), ("trl", "ext"))
    return report(stock, own)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

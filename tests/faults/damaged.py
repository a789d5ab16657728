"""`python -m tests.faults.damaged KIND FOLDER FIRST EVERY`: damage a trainer's checkpoints, and resume.

Writes `damaged.json` into the folder: the name of each case with what is wrong with how it ended, or "".
Cases are those from the FIRST on, EVERY so many.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import trl

from tests.faults import damage, jobs
from tests.faults.damage import NEW, OLDER, Case
from tests.faults.forks import in_fork, resume
from tests.faults.jobs import OUTPUT_DIR
from tests.faults.killed import files_in, started

FILE = "damaged.json"


def main(kind: str, folder: Path, first: int, every: int) -> None:
    """Write what became of every n-th case from the first one on."""
    trainer, whole = started(kind, folder, save_total_limit=None)
    whole.pop("calls")
    out = folder / "whole" / OUTPUT_DIR
    for step in range(NEW + 1, jobs.STEPS + 1):  # of which nothing may be left to resume from
        shutil.rmtree(out / f"checkpoint-{step}")
    for step in range(1, OLDER):
        shutil.rmtree(out / f"checkpoint-{step}")
    newest, older = out / f"checkpoint-{NEW}", out / f"checkpoint-{OLDER}"
    names = files_in(newest)
    equal = {name for name in names if (newest / name).read_bytes() == (older / name).read_bytes()}
    own = [name for name in names if name != damage.MANIFEST]
    cases = [*damage.files(own, equal), *damage.folders(foreign(kind, folder)), *damage.other_runs(kind)]
    results = {}
    for number, case in enumerate(cases[first::every]):
        results[case.name] = fault(kind, trainer, case, out, folder / f"{number:03}", whole)
    (folder / FILE).write_text(json.dumps(results, indent=1))


def fault(kind: str, trainer: Any, case: Case, out: Path, own: Path, whole: dict[str, Any]) -> str:
    """Return what is wrong with how a run ends that is told to resume from damaged folders; empty if nothing is."""
    shutil.copytree(out, own / OUTPUT_DIR)
    case.damage(own / OUTPUT_DIR)

    def work() -> dict[str, Any]:
        changes = case.settings()
        return resume(jobs.trainer(kind, **changes) if changes else trainer, case.wanted)

    return case.fault(in_fork(own, work), whole)


def foreign(kind: str, folder: Path) -> dict[tuple[str, str], Path]:
    """Save checkpoints of other trainers; return them by name and the words that have to be said of them."""
    made = {}
    for name in ("grpo", "reward", "ppo_head", "ppo_adapter"):
        if name == kind:
            continue
        # Of another critic, or of another trainer.
        says = "critic" if name.startswith("ppo") and kind.startswith("ppo") else "Trainer|critic"
        made[name, says] = _saved(folder / f"of_{name}", name)
    theirs = "grpo" if kind != "reward" else "reward"
    made[f"TRL's own {theirs}", f"{damage.MANIFEST}|critic"] = _saved(folder / "of_trl", theirs, library=trl)
    return made


def _saved(folder: Path, kind: str, **options: Any) -> Path:
    def work() -> dict[str, Any]:
        trainer = jobs.trainer(kind, max_steps=2, **options)
        trainer.train()
        return {}

    ending = in_fork(folder, work)
    assert ending.code == 0, ending.log[-3000:]
    return folder / OUTPUT_DIR / "checkpoint-2"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

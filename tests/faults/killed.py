"""`python -m tests.faults.killed KIND FOLDER QUARTER`: kill a trainer's run at many points, and resume each.

Writes `killed.json` into the folder: one entry a point, as `Killed` holds it.
"""

import gc
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.faults import jobs, points
from tests.faults.forks import LOG, Ending, counted_run, in_fork, resume, run_with_victims

FILE = "killed.json"


@dataclass(frozen=True)
class Killed:
    """One run that was killed, and the run that went on from what it left.

    Args:
        part: "chosen" or "random".
        point: Where.
        code: Exit code of the first run.
        found: Folders that the second found.
        resumed: Exit code of the second.
        differences: Of the second run's outcome from that of one which nobody killed.
        error: The last lines of the second's log if it failed.
    """

    part: str
    point: str
    code: int
    found: list[str]
    resumed: int
    differences: list[str]
    error: str


def main(kind: str, folder: Path, quarter: int | None) -> None:
    """Write what became of every point of the quarter; of all points for None."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    trainer = jobs.trainer(kind)
    gc.freeze()  # a fork copies a page on its first write, and collecting writes on all
    whole = _ended_well(in_fork(folder / "whole", lambda: counted_run(trainer)))
    calls = {int(step): counts for step, counts in whole.pop("calls").items()}
    chosen = points.chosen(kind, files_in(folder / "whole" / jobs.OUTPUT_DIR / f"checkpoint-{jobs.STEPS}"))
    parts = [("chosen", point) for point in chosen] + [("random", point) for point in points.at_random(kind)]
    tried = {str(folder / f"{i:03}"): part for i, part in enumerate(parts) if quarter in (None, i % 4)}
    repeated = _ended_well(
        in_fork(folder / "again", lambda: run_with_victims(trainer, {f: p for f, (_, p) in tried.items()}, calls))
    )
    codes = repeated.pop("codes")
    assert not jobs.differences(whole, repeated), f"{kind} does not repeat: {jobs.differences(whole, repeated)}"
    results = []
    for name, (part, point) in tried.items():
        found = sorted(path.name for path in Path(name, jobs.OUTPUT_DIR).iterdir())
        second = in_fork(Path(name), lambda: resume(trainer))
        differences = jobs.differences(whole, second.result) if second.result else ["no result"]
        error = "" if second.result else second.log[-2000:]
        results.append(Killed(part, str(point), codes[name], found, second.code, differences, error))
    (folder / FILE).write_text(json.dumps([asdict(result) for result in results], indent=1))


def tail_of(folder: Path) -> str:
    """Return the end of a run's log."""
    return (folder / LOG).read_text()[-2000:]


def _ended_well(ending: Ending) -> dict:
    assert ending.result is not None, f"exit code {ending.code}\n{ending.log[-4000:]}"
    return ending.result


def files_in(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint, from its folder on."""
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


if __name__ == "__main__":
    kind, folder, quarter = sys.argv[1:]
    main(kind, Path(folder), None if quarter == "all" else int(quarter))

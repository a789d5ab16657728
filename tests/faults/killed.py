"""`python -m tests.faults.killed KIND FOLDER FIRST EVERY`: kill a trainer's run at many points, and resume each.

Writes `killed.json` into the folder: one entry a point, as `Killed` holds it.
Points are those from the FIRST on, EVERY so many.
"""

import gc
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.faults import jobs, points
from tests.faults.forks import (
    LIMIT_S,
    Ending,
    counted_run,
    in_fork,
    prepare,
    resume,
    run_with_signal,
    run_with_victims,
)
from tests.faults.jobs import OUTPUT_DIR, STEPS

FILE = "killed.json"


@dataclass(frozen=True)
class Killed:
    """One run that was killed, and the run that went on from what it left.

    Args:
        part: "chosen" or "random"; "signal" if the run was asked to end, saved and ended.
        point: Where.
        code: Exit code of the first run.
        left: Files and folders that the second found.
        resumed: Exit code of the second.
        differences: Between the second run's outcome and that of the run which nobody killed.
        error: The last lines of the second's log if it failed.
    """

    part: str
    point: str
    code: int
    left: list[str]
    resumed: int
    differences: list[str]
    error: str

    @classmethod
    def of(
        cls, part: str, point: str, code: int, left: list[str], whole: list[dict[str, Any]], second: list[Ending]
    ) -> Self:
        """Compare the second run with the whole one; both of as many processes."""
        resumed = max((ending.code for ending in second), key=abs)
        if not all(ending.result for ending in second):
            return cls(part, point, code, left, resumed, ["no result"], "\n".join(e.log[-2000:] for e in second))
        pairs = enumerate(zip(whole, second, strict=True))
        found_out = [f"rank {i}: {name}" for i, (one, e) in pairs for name in jobs.differences(one, e.result or {})]
        return cls(part, point, code, left, resumed, found_out, "")


def main(kind: str, folder: Path, first: int, every: int) -> None:
    """Write what became of every n-th point from the first one on."""
    trainer, whole = started(kind, folder)
    calls = {int(step): counts for step, counts in whole.pop("calls").items()}
    chosen = points.chosen(kind, files_in(folder / "whole" / OUTPUT_DIR / f"checkpoint-{STEPS}"))
    parts = [("chosen", point) for point in chosen] + [("random", point) for point in points.at_random(kind)]
    tried = {str(folder / f"{number:03}"): part for number, part in enumerate(parts[first::every])}
    victims = {name: point for name, (_, point) in tried.items()}
    limit_s = LIMIT_S * (1 + len(victims))
    again = in_fork(folder / "again", lambda: run_with_victims(trainer, victims, calls), limit_s).well()
    codes = again.pop("codes")
    assert not jobs.differences(whole, again), f"{kind} does not repeat: {jobs.differences(whole, again)}"
    results = []
    for name, (part, point) in tried.items():
        found = sorted(path.name for path in Path(name, OUTPUT_DIR).iterdir())
        second = in_fork(Path(name), lambda: resume(trainer))
        results.append(Killed.of(part, str(point), codes[name], found, [whole], [second]))
    write(folder, results + signalled(kind, folder, first, every, whole, calls))


def signalled(
    kind: str, folder: Path, first: int, every: int, whole: dict[str, Any], calls: dict[int, dict[str, int]]
) -> list[Killed]:
    """Send SIGTERM and SIGINT to runs that save nothing but what they save then."""
    trainer, results = jobs.trainer(kind, save_steps=100), []
    for number, point in enumerate(points.of_signals(kind)[first % every :: every]):
        own, name = folder / f"signal_{number:02}", (signal.SIGTERM, signal.SIGINT)[number % 2]
        one = in_fork(own, partial(run_with_signal, trainer, point, calls, name))
        left = sorted(path.name for path in (own / OUTPUT_DIR).iterdir())
        second = in_fork(own, partial(resume, trainer))
        results.append(Killed.of("signal", f"{point}, {name.name}", one.code, left, [whole], [second]))
    return results


def started(kind: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Build the trainer, and let a fork train in `folder/whole`; return the trainer and what the fork came to."""
    prepare()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    trainer = jobs.trainer(kind, **changes)
    gc.freeze()  # a fork copies a page on its first write, and collecting writes on all
    return trainer, in_fork(folder / "whole", lambda: counted_run(trainer)).well()


def files_in(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint, from its folder on."""
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def write(folder: Path, results: list[Killed]) -> None:
    """Write the results for the test."""
    (folder / FILE).write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

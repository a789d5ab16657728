"""`python -m tests.faults.ranks KIND FOLDER FIRST EVERY [ZERO_CONFIG]`: as `killed.py`, for two processes.

One rank dies at the point or both do, and then the other is killed, as a launcher does. Every run is made anew: no
process of a group can be forked. Writes `killed.json` as `killed.py` does.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import jobs, points
from tests.faults.forks import RESULT, Ending, be_the_child, counted_run, ending_of, prepare, resume, wait
from tests.faults.jobs import OUTPUT_DIR, STEPS
from tests.faults.killed import Killed, files_in, write
from tests.faults.points import Point
from tests.ppo_trainers import prompts

WORLD_SIZE = 2
RANKS = range(WORLD_SIZE)
VICTIMS = ((0,), (1,), (0, 1))


def in_ranks(folder: Path, work: Callable[[int], Any], victims: tuple[int, ...] = ()) -> list[Ending]:
    """Do `work(rank)` in a process of a group for each rank; return how they ended.

    Args:
        folder: Each rank has a folder in it for its log and result; all write into the same output folder.
        work: Of a rank.
        victims: Ranks that die. When they have, the others are killed.
    """
    (folder / OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in RANKS:
        own = folder / str(rank)
        own.mkdir(exist_ok=True)
        (own / RESULT).unlink(missing_ok=True)
        if not (own / OUTPUT_DIR).exists():
            (own / OUTPUT_DIR).symlink_to(folder / OUTPUT_DIR)
        child = os.fork()
        if child == 0:
            names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=WORLD_SIZE, LOCAL_WORLD_SIZE=WORLD_SIZE)
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            be_the_child(own, partial(work, rank))
        children.append(child)
    codes = {rank: wait(children[rank]) for rank in victims}
    for rank in set(RANKS) - codes.keys():
        if victims:
            os.kill(children[rank], signal.SIGKILL)
        codes[rank] = wait(children[rank])
    return [ending_of(folder / str(rank), codes[rank]) for rank in RANKS]


@dataclass
class Runs:
    """Runs of a trainer by two processes.

    Args:
        kind: Of trainer.
        settings: Changes to it.
        calls: Of each rank, see `points.CallCounts`.
    """

    kind: str
    settings: dict[str, Any]
    calls: list[dict[int, dict[str, int]]] = field(default_factory=list)

    def whole(self, rank: int) -> dict[str, Any]:
        """Train from the start."""
        trainer = jobs.trainer(self.kind, **self.settings)
        return self._leave(trainer, counted_run(trainer))

    def killed(self, point: Point, victims: tuple[int, ...], rank: int) -> None:
        """Train until the point, or until a victim is dead."""
        trainer = jobs.trainer(self.kind, **self.settings)
        if rank in victims:
            trainer.add_callback(points.Meets(trainer, point, self.calls[rank]))
        trainer.train()

    def resumed(self, rank: int) -> dict[str, Any]:
        """Go on from the newest checkpoint."""
        trainer = jobs.trainer(self.kind, **self.settings)
        return self._leave(trainer, resume(trainer))

    def _leave(self, trainer: Any, result: dict[str, Any]) -> dict[str, Any]:
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        return result


def started(kind: str, folder: Path, zero: str | None = None) -> tuple[Runs, list[dict[str, Any]]]:
    """Train from the start in `folder/whole`; return the runs and what each rank came to."""
    prepare()
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"deepspeed": zero} if zero else {}
    if kind == "grpo":
        settings["model"] = jobs.saved_actor(folder / "actor")
    if kind.startswith("ppo"):
        settings["rows"] = prompts(32)  # one round of rollouts of both processes
    gc.freeze()  # a fork copies a page on its first write, and collecting writes on all
    runs = Runs(kind, settings)
    whole = in_ranks(folder / "whole", runs.whole)
    results = [ending.result for ending in whole]
    assert all(results), "\n".join(ending.log[-2000:] for ending in whole)
    runs.calls = [{int(step): counts for step, counts in result.pop("calls").items()} for result in results]
    return runs, results


def main(kind: str, folder: Path, first: int, every: int, zero: str | None = None) -> None:
    """Write what became of every n-th point from the first one on."""
    runs, whole = started(kind, folder, zero)
    chosen = points.chosen(kind, files_in(folder / "whole" / OUTPUT_DIR / f"checkpoint-{STEPS}"))
    parts = [("chosen", point) for point in chosen] + [("random", point) for point in points.at_random(kind)]
    found = []
    for number, (part, point) in enumerate(parts[first::every]):
        own, victims = folder / f"{number:03}", VICTIMS[number % len(VICTIMS)]
        if point.is_of_rank_0:
            victims = (0,)
        first = in_ranks(own, partial(runs.killed, point, victims), victims)
        left = sorted(path.name for path in (own / OUTPUT_DIR).iterdir())
        second = in_ranks(own, runs.resumed)
        code = min(first[rank].code for rank in victims)
        found.append(Killed.of(part, f"{point}, ranks {victims}", code, left, whole, second))
        write(folder, found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])

"""`python -m tests.faults.ranks KIND FOLDER EVERY [ZERO_CONFIG]`: what `killed.py` does, for runs of two processes.

A rank dies at the point, or both do; then a launcher would end the other, and so it is here. Every run is made anew,
for no process in a group can be forked. Writes `killed.json` as `killed.py` does.
"""

import gc
import json
import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.faults import jobs, points
from tests.faults.forks import OUTPUT_DIR, RESULT, be_the_child, counted_run, resume, wait
from tests.faults.killed import FILE, Killed, files_in, tail_of
from tests.faults.points import Point

WORLD_SIZE = 2
VICTIMS = ((0,), (1,), (0, 1))


class Meets(TrainerCallback):
    """Has this rank killed at the point, from the beginning of its step on."""

    def __init__(self, trainer: Any, point: Point, calls: dict[int, dict[str, int]]):
        self._trainer, self._point, self._calls = trainer, point, calls

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self._point.step:
            points.meet(self._trainer, self._point, self._calls[self._point.step])


def in_ranks(folder: Path, work: Any, victims: tuple[int, ...] = ()) -> list[int]:
    """Do `work(rank)` in a process of a group for each rank; return their exit codes.

    Args:
        folder: Where each rank has a folder for its log and result; all write into the same output folder.
        work: Of a rank.
        victims: Ranks that die. When one has, those that are left are killed.
    """
    (folder / OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(WORLD_SIZE):
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
            be_the_child(own, lambda: work(rank))
        children.append(child)
    codes = {}
    for rank in [*victims, *(rank for rank in range(WORLD_SIZE) if rank not in victims)]:
        if victims and rank not in victims:
            os.kill(children[rank], signal.SIGKILL)
        codes[rank] = wait(children[rank])
    return [codes[rank] for rank in range(WORLD_SIZE)]


def main(kind: str, folder: Path, every: int, zero: str | None = None) -> None:
    """Write what became of every n-th point."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"deepspeed": zero} if zero else {}
    if kind == "grpo":
        jobs.saved_actor(folder=folder / "actor")
        settings["model"] = str(folder / "actor")
    gc.freeze()

    def results(part: Path) -> list[Any]:
        return [json.loads((part / str(rank) / RESULT).read_text()) for rank in range(WORLD_SIZE)]

    def whole_run(rank: int) -> Any:
        return leave(trainer := jobs.trainer(kind, **settings), counted_run(trainer))

    codes = in_ranks(folder / "whole", whole_run)
    assert codes == [0, 0], f"{codes}\n{tail_of(folder / 'whole' / '0')}\n{tail_of(folder / 'whole' / '1')}"
    whole = results(folder / "whole")
    calls = [{int(step): counts for step, counts in result.pop("calls").items()} for result in whole]
    chosen = points.chosen(kind, files_in(folder / "whole" / OUTPUT_DIR / f"checkpoint-{jobs.STEPS}"))
    parts = [("chosen", point) for point in chosen] + [("random", point) for point in points.at_random(kind)]
    found = []
    for i, (part, point) in [*enumerate(parts)][::every]:
        own, victims = folder / f"{i:03}", VICTIMS[i // every % len(VICTIMS)]
        if point.what in points.OF_RANK_0:
            victims = (0,)

        def killed_run(rank: int, point: Point = point, victims: tuple[int, ...] = victims) -> Any:
            trainer = jobs.trainer(kind, **settings)
            if rank in victims:
                trainer.add_callback(Meets(trainer, point, calls[rank]))
            trainer.train()

        def resumed_run(rank: int) -> Any:
            return leave(trainer := jobs.trainer(kind, **settings), resume(trainer))

        codes = in_ranks(own, killed_run, victims)
        left = sorted(path.name for path in (own / OUTPUT_DIR).iterdir())
        resumed = in_ranks(own, resumed_run)
        is_whole = resumed == [0] * WORLD_SIZE
        differences = [
            f"rank {rank}: {name}"
            for rank, result in enumerate(results(own) if is_whole else [])
            for name in jobs.differences(whole[rank], result)
        ]
        name = f"{point} on ranks {victims}"
        error = "" if is_whole else "\n".join(tail_of(own / str(rank)) for rank in range(WORLD_SIZE))
        found.append(
            Killed(
                part,
                name,
                codes[victims[0]],
                left,
                max(resumed, key=abs),
                differences or ["no result"] * (not is_whole),
                error,
            )
        )
        (folder / FILE).write_text(json.dumps([asdict(result) for result in found], indent=1))


def leave(trainer: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Leave the group of processes in order; return the result."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return result


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])

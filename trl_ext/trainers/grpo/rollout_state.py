"""State that a run in the middle of its rollouts needs to go on as if it had not stopped.

TRL generates once for several optimizer steps and keeps what it generated in memory: a run that resumes between two of
them generates again, with newer weights. And its sampler deals the first epoch's order again. Both are kept here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler


@dataclass(eq=False)
class EpochSampler(Sampler):
    """A sampler whose generator draws once an epoch, put at the epoch that is asked for.

    Args:
        sampler: TRL's RepeatSampler.
    """

    sampler: Any

    def set_epoch(self, epoch: int) -> None:
        """Put the generator where `epoch` passes leave it."""
        if not self.sampler.shuffle or self.sampler.seed is None:
            return
        self.sampler.generator.manual_seed(self.sampler.seed)
        for _ in range(epoch):
            torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def save_rollouts(
    folder: str, rank: int, num_processes: int, step: int, rollouts: list[dict[str, Any]] | None
) -> None:
    """Write this rank's micro-batches that wait to be trained on, and how many were drawn since the start."""
    torch.save({"step": step, "rollouts": rollouts, "processes": num_processes}, _file(folder, rank))


def load_rollouts(
    folder: str, rank: int, num_processes: int, device: torch.device
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Return the step and the rollouts that `save_rollouts` wrote.

    None where it wrote none, as in a checkpoint of TRL's own, or where another number of processes did.
    """
    path = _file(folder, rank)
    if not path.is_file():
        return None
    # torch.load does not know "cpu:0", which is accelerate's name of a launched process' CPU.
    state = torch.load(path, map_location="cpu" if device.type == "cpu" else device, weights_only=True)
    return (state["step"], state["rollouts"]) if state.get("processes", num_processes) == num_processes else None


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rollouts_{rank}.pt"

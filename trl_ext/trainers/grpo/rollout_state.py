"""State that a run in the middle of its rollouts needs to go on as if it had not stopped.

TRL generates once for several optimizer steps and keeps what it generated in memory: a run that resumes between two of
them generates again, with newer weights. And its sampler deals the first epoch's order again. Both are kept here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from trl_ext.trainers.checkpoints import moving_reference
from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.grpo.rewards import load_statistics, save_statistics


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


def save(
    folder: str,
    args: Any,
    step: int,
    rollouts: list[dict[str, Any]] | None,
    reward_funcs: Sequence[Any],
    reference: nn.Module | None,
) -> None:
    """Write this rank's part, and what rank 0 writes. Collective where a reference is divided over processes.

    Args:
        folder: The checkpoint's.
        args: The trainer's config.
        step: Micro-batches that were drawn since the start.
        rollouts: Micro-batches that wait to be trained on; None where none do.
        reward_funcs: Some of which have running statistics.
        reference: One that moves; None without.
    """
    if reference is not None:
        moving_reference.save(reference, folder, is_writer=args.should_save)
    state = {"step": step, "rollouts": rollouts, "processes": args.world_size, "corrects": corrects(args)}
    torch.save(state, _file(folder, args.process_index))
    if args.should_save:
        save_statistics(reward_funcs, folder)


def corrects(args: Any) -> bool:
    """Return whether the loss weighs rollouts by the ratio of the policy's probability to vLLM's."""
    return bool(args.use_vllm and args.vllm_importance_sampling_correction)


def check(folder: str, args: Any) -> None:
    """Raise ConfigError for a checkpoint that lacks a reference that moves."""
    if args.sync_ref_model:
        moving_reference.check_saved(folder)


def load(
    folder: str, args: Any, device: torch.device, reward_funcs: Sequence[Any], reference: nn.Module | None
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Restore what `save` wrote; return the step and the rollouts. Collective.

    None where a process has none that it can use, as in a checkpoint of TRL's own, or after a run of other processes,
    of other batches, or with vLLM's correction where this has none, or the other way round. The run then generates
    again, as TRL does.
    """
    if reference is not None:
        moving_reference.load(reference, folder)
    load_statistics(reward_funcs, folder)
    path, state = _file(folder, args.process_index), None
    if path.is_file():
        # torch.load does not know "cpu:0", which is accelerate's name of a launched process' CPU.
        state = torch.load(path, map_location="cpu" if device.type == "cpu" else device, weights_only=True)
        rollouts = state["rollouts"] or ()
        is_other = state.get("corrects", corrects(args)) != corrects(args)
        if state["processes"] != args.world_size or len(rollouts) not in (0, args.steps_per_generation) or is_other:
            state = None
    if not all(gathered(args, state is not None)):
        return None
    assert state is not None
    return state["step"], state["rollouts"]


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rollouts_{rank}.pt"

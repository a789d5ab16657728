"""Rollouts, sampler state and a moving reference in a checkpoint, so that a resumed run equals an uninterrupted run.

TRL generates once for several optimizer steps and keeps the rollouts in memory only: a run that resumes between these
steps generates again, with newer weights. And TRL's sampler repeats the first epoch's order.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler

from trl_ext.compat.distributed import sharded_as
from trl_ext.errors import ConfigError
from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.grpo.rewards import load_statistics, save_statistics

REFERENCE_FILE = "reference.safetensors"


@dataclass(eq=False)
class EpochSampler(Sampler):
    """TRL's RepeatSampler, which draws once per epoch, with its generator set to a given epoch."""

    sampler: Any

    def set_epoch(self, epoch: int) -> None:
        """Set the generator to its state after `epoch` epochs."""
        if not self.sampler.shuffle or self.sampler.seed is None:
            return
        self.sampler.generator.manual_seed(self.sampler.seed)
        for _ in range(epoch):
            torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def let_epochs_through(loader: Any) -> None:
    """Let `set_epoch` of accelerate's loader reach the sampler behind the batches that a resumed run skips.

    accelerate looks for the sampler in two wrappers; skipped batches of several processes stand in three.
    """
    batches = loader.batch_sampler
    if isinstance(batches, BatchSamplerShard):
        batches.sampler = batches.batch_sampler.sampler


def save(
    folder: str,
    args: Any,
    step: int,
    rollouts: list[dict[str, Any]] | None,
    reward_funcs: Sequence[Any],
    reference: nn.Module | None,
) -> None:
    """Write this rank's state into a checkpoint, and rank 0's files. Collective if a reference is sharded.

    Args:
        step: Micro-batches that were drawn since the start.
        rollouts: Micro-batches that wait to be trained on, or None.
        reward_funcs: Reward functions, of which rule sets may have running statistics.
        reference: A reference that moves, or None.
    """
    if reference is not None:
        save_reference(reference, folder, is_writer=args.should_save)
    state = {"step": step, "rollouts": rollouts, "processes": args.world_size, "corrects": corrects(args)}
    torch.save(state, _file(folder, args.process_index))
    if args.should_save:
        save_statistics(reward_funcs, folder)


def corrects(args: Any) -> bool:
    """Return True if the loss weighs rollouts by the ratio of the policy's probability to vLLM's."""
    return bool(args.use_vllm and args.vllm_importance_sampling_correction)


def check(folder: str, args: Any) -> None:
    """Raise ConfigError for a checkpoint that lacks a reference that moves."""
    if args.sync_ref_model and Path(folder).is_dir() and not Path(folder, REFERENCE_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {REFERENCE_FILE}, from which sync_ref_model=True goes on: TRL's and runs without it "
            "save none. Give the folder as the model of a new run."
        )


def load(
    folder: str, args: Any, device: torch.device, reward_funcs: Sequence[Any], reference: nn.Module | None
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Restore the state that `save` wrote; return the step and the rollouts. Collective.

    Return None if the rollouts of some process cannot be used: a checkpoint of plain TRL, another number of processes,
    other batches, or vLLM's correction in only one of the two runs. The run then generates again, as TRL does.

    Args:
        folder: The checkpoint.
        args: The run's config.
        device: For the rollouts.
        reward_funcs: Those with a state load it.
        reference: A reference that moves, whose weights are loaded; or None.
    """
    if reference is not None:
        load_reference(reference, folder)
    load_statistics(reward_funcs, folder)
    path, state = _file(folder, args.process_index), None
    if path.is_file():
        # torch.load rejects "cpu:0", accelerate's name for the CPU of a launched process.
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


def save_reference(model: nn.Module, folder: str, *, is_writer: bool) -> None:
    """Write the reference's full weights. Collective if they are sharded."""
    weights = {}
    for name, parameter in model.named_parameters():
        with _gather(parameter):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if is_writer:
                weights[name] = whole.detach().cpu().clone(memory_format=torch.contiguous_format)
    if is_writer:
        save_file(weights, Path(folder) / REFERENCE_FILE)


def load_reference(model: nn.Module, checkpoint: str) -> None:
    """Load into the reference what `save_reference` wrote; every process reads the file. Collective if sharded."""
    with safe_open(Path(checkpoint) / REFERENCE_FILE, "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            saved = sharded_as(parameter, file.get_tensor(name))
            with _gather(parameter):
                parameter.copy_(saved)


def _gather(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """Gather a parameter that ZeRO-3 has sharded within the context, and write changes back after it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)

"""Rehearsal: before step 1 the largest micro-batch goes forward and backward, and its gradients are dropped.

A run that would be out of memory after hours, when the longest rows meet, fails after 20 seconds instead. Training
then continues with unchanged weights, optimizer, random numbers, metrics and counters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.utils import logging

from trl_ext.errors import OutOfMemoryError
from trl_ext.memory.cards import HEADROOM_FRAC
from trl_ext.memory.formulas.peak import PHASE_WORDS
from trl_ext.memory.units import in_gib
from trl_ext.monitor.card_memory import MemoryAudit, MemoryMeter, MemorySource, MemoryWatch, source_of
from trl_ext.trainers.fit.message import cheapest_change, explained, faster_checkpointing
from trl_ext.trainers.fit.rehearsal.inputs import MicroBatch
from trl_ext.trainers.fit.rehearsal.state import nothing_remains, steppers, trained_models, why_not
from trl_ext.trainers.fit.trainer import RehearsedTrainer
from trl_ext.trainers.forward.gradient_sync import gradients_unsynced
from trl_ext.trainers.step.out_of_memory import is_out_of_memory

logger = logging.get_logger(__name__)

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.DEEPSPEED)
# Optimizers that step within the backward.
_STEP_IN_BACKWARD = ("lomo", "adalomo")
SCARCE_FRAC = 0.03  # of a card; if less is free, the next long batch may not fit


def watch_memory(trainer: RehearsedTrainer, phases: Sequence[str]) -> None:
    """Add callbacks that rehearse before step 1 and, on a card, compare each step's memory with the plan.

    Called at the end of the trainer's constructor. `phases` are the planner's phases of this trainer.
    """
    trainer.add_callback(Rehearsal(trainer))
    source = source_of(trainer.accelerator.device)
    if source is None:
        return
    plan = getattr(trainer.args, "memory_plan", None)
    trainer.add_callback(
        MemoryWatch(
            MemoryMeter(source, phases),
            MemoryAudit(
                None if plan is None else {name: moment.num_bytes for name, moment in plan.estimate.worst.items()},
                PHASE_WORDS,
                remedy=lambda: cheapest_change(trainer),
                warn=lambda sentence: _say(trainer, sentence),
            ),
            trainer.clock,
            largest=lambda numbers: _largest(trainer, numbers),
            steppers=lambda: steppers(trainer),
            note=trainer.add_metric,
        )
    )


class Rehearsal(TrainerCallback):
    """Rehearses once, when model and optimizer are wrapped and no batch is drawn yet.

    Added after all callbacks that prepare something to be trained.
    """

    def __init__(self, trainer: RehearsedTrainer):
        self._trainer = trainer
        self._is_done = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        source = source_of(self._trainer.accelerator.device)
        is_on = getattr(args, "memory_rehearsal", None)
        if self._is_done or not (source is not None if is_on is None else is_on):
            return
        self._is_done = True
        reason = _why_not(self._trainer)
        if reason:
            _say(self._trainer, f"There is no rehearsal of the largest micro-batch: {reason.rstrip('.')}.")
        else:
            rehearse(self._trainer, source)


def rehearse(trainer: RehearsedTrainer, source: MemorySource | None) -> None:
    """Run one micro-batch, or two if gradients are accumulated, as the second adds to existing ones. Collective.

    A forward that does not fit is run again in chunks as in training, and training starts with these chunks.

    Raises:
        OutOfMemoryError: It does not fit, and cannot be cut into chunks.
    """
    trainer.check_packing(trainer.model_wrapped)  # needed now under DeepSpeed: it decides how rows are forwarded
    batch = trainer.largest_micro_batch()
    if source is not None:
        source.reset()
    with nothing_remains(trainer):
        try:
            if trainer.args.gradient_accumulation_steps > 1 or trainer.step_settings.max_tokens is not None:
                with gradients_unsynced(trainer.accelerator, trainer.model_wrapped):
                    trainer.rehearse(batch)
            trainer.accelerator.gradient_state._set_sync_gradients(True)
            trainer.rehearse(batch)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise _in_words(error, trainer, batch) from error
            error.add_note("This was the rehearsal before step 1. memory_rehearsal=False leaves it out.")
            raise
    _report(trainer, batch, source)


def _why_not(trainer: RehearsedTrainer) -> str:
    """Return a reason not to rehearse, the same on all ranks; "" if there is none."""
    kind = trainer.accelerator.distributed_type
    if kind not in _PLAIN:
        return f"under {kind.value} it is not known how to drop gradients"
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if optim in _STEP_IN_BACKWARD or "layerwise" in optim:
        return f"optim={optim} changes weights within backward"
    engines = trained_models(trainer) if kind == DistributedType.DEEPSPEED else []
    return next(filter(None, map(why_not, engines)), "") or trainer.why_not_rehearse()


def _in_words(error: RuntimeError, trainer: RehearsedTrainer, batch: MicroBatch) -> OutOfMemoryError:
    """Return an error that names the batch, its settings, the plan's prediction and settings that would fit."""
    args, plan = trainer.args, getattr(trainer.args, "memory_plan", None)
    text = (
        f"Out of memory in the rehearsal, before step 1: {batch.what}, the largest micro-batch that may come, do not "
        f"fit (per_device_train_batch_size={args.per_device_train_batch_size}, "
        f"gradient_checkpointing={args.gradient_checkpointing}, packing={trainer.step_settings.packs}). "
    )
    if plan is not None and "update" in plan.estimate.worst:
        predicted = plan.estimate.worst["update"].num_bytes
        text += f"The plan predicted {in_gib(predicted)} {PHASE_WORDS['update']}. "
    return OutOfMemoryError(f"{text}{explained(error, trainer)} memory_rehearsal=False skips the rehearsal.")


def _report(trainer: RehearsedTrainer, batch: MicroBatch, source: MemorySource | None) -> None:
    """Log the peak, and a warning if step 1 will leave almost no memory."""
    if source is None:
        _say(trainer, f"Rehearsal: {batch.what} went forward and backward.")
        return
    (peak,) = _largest(trainer, [float(source.peak_bytes())])
    state = state_bytes_to_come(trainer)
    _say(
        trainer,
        f"Rehearsal: {batch.what}, {in_gib(peak)} allocated at the peak"
        + (f"; the optimizer's state of {in_gib(state)} comes with step 1." if state else "."),
    )
    free, total = source.free_and_total_bytes()
    used_by_others = total - free - source.peak_reserved_bytes()
    left = total - max(used_by_others, 0) - peak - state
    if left < SCARCE_FRAC * total:
        hint = cheapest_change(trainer)
        _say(trainer, f"That leaves {in_gib(max(left, 0))} of {in_gib(total)}. {hint[:1].upper()}{hint[1:]}")
    elif found := faster_checkpointing(trainer, left - HEADROOM_FRAC * total):
        trainer.faster_checkpointing = found
        _say(trainer, f"That leaves {in_gib(left)} of {in_gib(total)}: {found}.")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # blocks of the largest micro-batch's shapes are of little use to other shapes
    source.reset()


def state_bytes_to_come(trainer: RehearsedTrainer) -> float:
    """Return the bytes of Adam's two values per weight trained on this rank; 0 if they exist or are on the host.

    Estimated by formula, in the dtype of the trained weights: float32 under DeepSpeed, which trains a master copy
    sharded over the ranks.
    """
    args = trainer.args
    optim = str(getattr(args.optim, "value", args.optim))
    if trainer.state.global_step or "adam" not in optim or "paged" in optim:
        return 0.0
    is_8bit = "8bit" in optim
    weights = [p for model in trained_models(trainer) for p in model.parameters() if p.requires_grad]
    if trainer.accelerator.distributed_type != DistributedType.DEEPSPEED:
        return float(sum(p.numel() * 2 * (1 if is_8bit else p.element_size()) for p in weights))
    optimizers = [engine.optimizer for engine in trained_models(trainer)]
    if any(getattr(one, "cpu_offload", False) or getattr(one, "offload_optimizer", False) for one in optimizers):
        return 0.0
    each = 2 if is_8bit else 8
    return sum(getattr(p, "ds_numel", p.numel()) for p in weights) * each / trainer.accelerator.num_processes


def _largest(trainer: RehearsedTrainer, numbers: list[float]) -> list[float]:
    """Return the largest value of each number over ranks. Collective."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return numbers
    # float64, as byte counts exceed what float32 holds exactly.
    local = torch.tensor([numbers], dtype=torch.float64, device=accelerator.device)
    return accelerator.gather(local).amax(dim=0).tolist()


def _say(trainer: RehearsedTrainer, sentence: str) -> None:
    if trainer.accelerator.is_main_process:
        logger.warning(sentence)  # warnings are shown by default

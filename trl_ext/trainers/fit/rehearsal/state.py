"""Restore everything that a forward and a backward of a trainer change.

The trainer's metrics, token counts and clock are replaced by temporary objects; numbers are stored and restored;
gradients are dropped; random number generators return to their previous state.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType

from trl_ext.compat.swap import restored, swapped
from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.fit.trainer import FittedTrainer
from trl_ext.trainers.step.settings import StepCounts

# Numbers that a training step of TRL's trainers or ours counts, if the trainer has them.
_COUNTERS = (
    "_step",
    "_current_train_step_time",
    "_total_train_tokens",
    "_last_world_entropy",
    "_entropy_window_stats",
    "entropy_coef",
    "_forwards",
)


def _own_critic(trainer: FittedTrainer) -> Any:
    """Return PPO's critic if it has a separate optimizer, else None."""
    critic = getattr(trainer, "_critic", None)
    return None if critic is None or critic.is_trained_with_actor else critic


def trained_models(trainer: FittedTrainer) -> list[Any]:
    """Return the trained models, as wrapped for training: the policy, and the critic if it is separate."""
    critic = _own_critic(trainer)
    return [trainer.model_wrapped, *([] if critic is None else [critic.wrapped])]


def steppers(trainer: FittedTrainer) -> list[Any]:
    """Return the objects whose `step` is a trained model's optimizer step: DeepSpeed engines or torch optimizers."""
    if trainer.is_deepspeed_enabled:
        return trained_models(trainer)
    critic = _own_critic(trainer)
    return [trainer.optimizer.optimizer, *([] if critic is None else [critic.optimizer.optimizer])]


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Restore the state of the random number generators after the block."""
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=cards))
        yield


@contextmanager
def nothing_remains(trainer: FittedTrainer) -> Iterator[None]:
    """Let the trainer run forwards and backwards inside the block, and restore it afterwards."""
    is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    models, critic = trained_models(trainer), _own_critic(trainer)
    gradient_state = trainer.accelerator.gradient_state
    with ExitStack() as stack:
        stack.enter_context(random_numbers_restored())
        for module in (module for model in models for module in model.modules()):
            stack.callback(setattr, module, "training", module.training)
        stack.enter_context(restored(trainer, *_COUNTERS))
        stack.enter_context(
            swapped(
                trainer,
                _metrics={mode: defaultdict(list) for mode in ("train", "eval")},
                clock=PhaseClock(),
                counts=StepCounts(),
                # The rehearsal makes its inputs: nothing is generated, and no rollout is used.
                _prepare_inputs=lambda inputs: inputs,
                current_gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
            )
        )
        stack.callback(gradient_state._set_sync_gradients, gradient_state.sync_gradients)
        if critic is not None:
            stack.enter_context(swapped(critic, backward_and_step=critic.backward))
        if is_deepspeed:
            for engine in models:  # accelerate calls `step` within backward
                stack.enter_context(swapped(engine, step=lambda *args, **kwargs: None))
        try:
            yield
        finally:
            for model in models:
                if is_deepspeed:
                    is_stage_3 = model.zero_optimization_partition_weights()
                    (_drop_stage_3 if is_stage_3 else _drop_stage_1_or_2)(model.optimizer)
                    model.zero_grad()
                for parameter in model.parameters():
                    parameter.grad = None
            torch.clear_autocast_cache()


# Attributes used below. DeepSpeed's optimizer for bf16 gradients accumulated in fp32 has none of them.
_STAGE_1_OR_2 = ("averaged_gradients", "all_grad_tensors", "_release_preflattened_grad_buffers", "micro_step_id")
_STAGE_3 = ("averaged_gradients", "grad_partitions_flat_buffer", "_offload_boundary_param_ids", "micro_step_id")


def why_not(engine: Any) -> str:
    """Return why this engine's gradients cannot be dropped; "" if they can."""
    needed = _STAGE_3 if engine.zero_optimization_partition_weights() else _STAGE_1_OR_2
    if not engine.zero_optimization() or not all(hasattr(engine.optimizer, name) for name in needed):
        return f"DeepSpeed's {type(engine.optimizer).__name__} keeps gradients where only its step clears them"
    if engine.zenflow:
        return "ZenFlow's optimizer works while backward runs"
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "the optimizer is offloaded to disk, where backward writes its gradients"
    return ""


def _drop_stage_1_or_2(optimizer: Any) -> None:
    optimizer._wait_for_offload_copies()
    optimizer.zero_grad(set_to_none=True)
    optimizer._release_preflattened_grad_buffers()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    optimizer.micro_step_id = -1  # the next forward begins with micro-step 0
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer.accumulated_grads_in_cpu.clear()
        optimizer._offload_accumulated_param_ids.clear()
        _zero_master_gradients(optimizer.single_partition_of_fp32_groups)


def _drop_stage_3(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)  # also sets the micro-step to 0, which overwrites instead of adding
    optimizer.averaged_gradients.clear()
    # A weight without a gradient in the first real backward must have zeros here.
    optimizer.grad_partitions_flat_buffer.zero_()
    optimizer._offload_boundary_param_ids.clear()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
        _zero_master_gradients(optimizer.fp32_partitioned_groups_flat)


def _zero_master_gradients(groups: Any) -> None:
    for group in groups:
        if group.grad is not None:
            group.grad.zero_()

"""Everything that a forward and a backward of a trainer change, put back afterwards.

Metrics, token counts and clock of the trainer are replaced by ones that are thrown away; numbers are noted and
restored; gradients are dropped; the generators of random numbers go on where they were.
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
from trl_ext.trainers.fit.rehearsal.zero import drop_gradients
from trl_ext.trainers.forward.step import StepCounts

# Numbers that a training step of TRL's trainers or ours counts up, where the trainer has them.
_COUNTERS = (
    "_step",
    "_current_train_step_time",
    "_total_train_tokens",
    "_last_world_entropy",
    "_entropy_window_stats",
    "entropy_coef",
    "_forwards",
)


def _own_critic(trainer: Any) -> Any:
    """PPO's critic if it has an optimizer of its own, else None."""
    critic = getattr(trainer, "_critic", None)
    return None if critic is None or critic.is_trained_with_actor else critic


def trained_models(trainer: Any) -> list[Any]:
    """The models that are trained, as wrapped for training: the policy, and a critic of its own if there is one."""
    critic = _own_critic(trainer)
    return [trainer.model_wrapped, *([] if critic is None else [critic.wrapped])]


def steppers(trainer: Any) -> list[Any]:
    """Objects whose `step` is the optimizer step of a trained model: DeepSpeed's engines, or torch's optimizers."""
    if trainer.is_deepspeed_enabled:
        return trained_models(trainer)
    critic = _own_critic(trainer)
    return [trainer.optimizer.optimizer, *([] if critic is None else [critic.optimizer.optimizer])]


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Let the generators of random numbers go on after the block where they were before it."""
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=cards))
        yield


@contextmanager
def nothing_remains(trainer: Any) -> Iterator[None]:
    """Let the trainer go forward and backward inside the block, and restore it after."""
    is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    models, critic = trained_models(trainer), _own_critic(trainer)
    gradient_state = trainer.accelerator.gradient_state
    with ExitStack() as stack:
        stack.enter_context(random_numbers_restored())
        for module in (module for model in models for module in model.modules()):
            stack.callback(setattr, module, "training", module.training)
        stack.enter_context(restored(trainer, *_COUNTERS))
        stack.enter_context(swapped(trainer, **_thrown_away(trainer)))
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
                    drop_gradients(model)
                for parameter in model.parameters():
                    parameter.grad = None
            torch.clear_autocast_cache()


def _thrown_away(trainer: Any) -> dict[str, Any]:
    """Return what stands in for metrics, counters and inputs of the trainer, and is thrown away."""
    return {
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "clock": PhaseClock(),
        "counts": StepCounts(),
        # Inputs are made by hand: nothing is generated, and no rollout is taken.
        "_prepare_inputs": lambda inputs: inputs,
        "current_gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
        "_is_rehearsing": True,
    }

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

from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.memory.rehearsal.zero import drop_gradients, steps_held
from trl_ext.trainers.token_counts import TokenCounts

# Numbers that a training step of TRL's trainers or ours counts up, where the trainer has them.
_COUNTERS = (
    "_step",
    "_current_train_step_time",
    "_total_train_tokens",
    "_last_world_entropy",
    "_entropy_window_stats",
    "entropy_coef",
    "_micro_batch",
)
_MISSING = object()


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
def nothing_remains(trainer: Any) -> Iterator[None]:
    """Let the trainer go forward and backward inside the block, and restore it after."""
    is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    models, critic = trained_models(trainer), _own_critic(trainer)
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_modes(models))
        stack.enter_context(_restored(trainer, _COUNTERS))
        stack.enter_context(_thrown_away(trainer))
        stack.enter_context(_sync_restored(trainer.accelerator.gradient_state))
        if critic is not None:
            stack.enter_context(_restored(critic, ("backward_and_step",)))
            critic.backward_and_step = critic.backward
        if is_deepspeed:
            stack.enter_context(steps_held(models))
        try:
            yield
        finally:
            for model in models:
                if is_deepspeed:
                    drop_gradients(model)
                for parameter in model.parameters():
                    parameter.grad = None
            torch.clear_autocast_cache()


@contextmanager
def _thrown_away(trainer: Any) -> Iterator[None]:
    """Replace metrics and counters inside the block by ones that are thrown away."""
    replaced = {
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "_clock": PhaseClock(),
        "_tokens": TokenCounts(),
        "_step_stats": [],
        # Inputs are made by hand: nothing is generated, and no rollout is taken.
        "_prepare_inputs": lambda inputs: inputs,
        "current_gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
        "_is_rehearsing": True,
    }
    with _restored(trainer, tuple(replaced)):
        vars(trainer).update(replaced)
        yield


@contextmanager
def _restored(thing: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Restore attributes of the instance after the block; absent ones are absent again."""
    before = {name: vars(thing).get(name, _MISSING) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                vars(thing).pop(name, None)
            else:
                vars(thing)[name] = value


@contextmanager
def _sync_restored(state: Any) -> Iterator[None]:
    before = state.sync_gradients
    try:
        yield
    finally:
        state._set_sync_gradients(before)


@contextmanager
def _modes(models: list[Any]) -> Iterator[None]:
    """Restore after the block which modules train and which evaluate."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch after the block, on the CPU and on this rank's card."""
    python, numpy = random.getstate(), np.random.get_state()
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

"""Everything that a forward and a backward of a trainer change, put back afterwards.

The books of a trainer (metrics, token counts, clock) are replaced by ones that are thrown away; numbers are noted and
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


def trained_models(trainer: Any) -> list[Any]:
    """What is trained, as wrapped for training: the model, and a critic of its own if there is one."""
    critic = getattr(trainer, "_critic", None)
    alone = critic is not None and not critic.is_trained_with_actor
    return [trainer.model_wrapped, *([critic.wrapped] if alone else [])]


def steppers(trainer: Any) -> list[Any]:
    """What makes the optimizer step of each: DeepSpeed's engines, or torch's optimizers."""
    if trainer.is_deepspeed_enabled:
        return trained_models(trainer)
    critic = getattr(trainer, "_critic", None)
    alone = critic is not None and not critic.is_trained_with_actor
    return [one.optimizer for one in [trainer.optimizer, *([critic.optimizer] if alone else [])]]


@contextmanager
def nothing_remains(trainer: Any) -> Iterator[None]:
    """Inside the block the trainer may go forward and backward; after it, it is as it was."""
    is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    models, critic = trained_models(trainer), getattr(trainer, "_critic", None)
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_modes(models))
        stack.enter_context(_restored(trainer, _COUNTERS))
        stack.enter_context(_thrown_away(trainer))
        stack.enter_context(_sync_restored(trainer.accelerator.gradient_state))
        if critic is not None and not critic.is_trained_with_actor:
            stack.enter_context(_restored(critic, ("backward_and_step",)))
            critic.backward_and_step = critic.backward
        if is_deepspeed:
            stack.enter_context(steps_held(models))
        try:
            yield
        finally:
            for model in models:
                _drop(model, is_deepspeed)
            torch.clear_autocast_cache()


def _drop(model: Any, is_deepspeed: bool) -> None:
    if is_deepspeed:
        drop_gradients(model)
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _thrown_away(trainer: Any) -> Iterator[None]:
    """Books for the time of the block. The real ones know nothing of it."""
    books = {
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "_clock": PhaseClock(),
        "_tokens": TokenCounts(),
        "_step_stats": [],
        # Inputs are made by hand: nothing is generated, and no rollout is taken.
        "_prepare_inputs": lambda inputs: inputs,
        "current_gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
        "_is_rehearsing": True,
    }
    with _restored(trainer, tuple(books)):
        vars(trainer).update(books)
        yield


@contextmanager
def _restored(thing: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Attributes of the instance as they were, absent ones absent again."""
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
    """Training or evaluation, module by module."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _random_states() -> Iterator[None]:
    """Python's, numpy's and torch's generators, on the CPU and on this rank's card."""
    python, numpy = random.getstate(), np.random.get_state()
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

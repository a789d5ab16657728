"""The attributes of a trainer that an optimizer step is planned and run by."""

from collections.abc import Mapping
from typing import Any, Protocol

from accelerate import Accelerator

from trl_ext.trainers.step.settings import StepCounts, StepSettings


class Levels(Protocol):
    """The number of halvings of the forwards of each role, "actor" or "critic"."""

    @property
    def level(self) -> Mapping[str, int]: ...


class Loop(Protocol):
    """The trainer's loop over forwards."""

    @property
    def halving(self) -> Levels: ...


class RunningTrainer(Protocol):
    """A trainer whose forwards run one by one: of any kind.

    Args:
        args: Its config.
        accelerator: Its accelerator.
        counts: Tokens and metrics of the running optimizer step.
        step_settings: The present settings of its forwards.
    """

    args: Any
    accelerator: Accelerator
    counts: StepCounts

    @property
    def step_settings(self) -> StepSettings: ...


class StepTrainer(RunningTrainer, Protocol):
    """A GRPO trainer, whose rows are planned over an optimizer step.

    Args:
        model: The policy, unwrapped.
        forward_loop: Runs the planned forwards.
        num_generations: Completions of a prompt.
        num_iterations: Updates on the same rollouts.
        importance_sampling_level: "token" or "sequence".
        aux_loss_enabled: Whether the load-balancing loss of a mixture of experts is added.
        current_gradient_accumulation_steps: Micro-batches of the running optimizer step.
    """

    model: Any
    num_generations: int | None
    num_iterations: int
    importance_sampling_level: str
    aux_loss_enabled: bool
    current_gradient_accumulation_steps: int

    @property
    def forward_loop(self) -> Loop: ...

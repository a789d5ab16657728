"""Separate learning rate schedules of actor and critic, with 0 for the actor in the critic's warm-up.

A schedule is a factor of the initial learning rate by optimizer step. In the warm-up the actor's weights do not change
in any bit, under any engine. Its Adam state stays fresh, too: gradients of 0 keep the moments at 0, and the step count
is reset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, get_scheduler

from trl_ext.errors import ConfigError

Factor = Callable[[int], float]
OF_CRITIC = "of_critic"  # key of an optimizer's groups, which DeepSpeed keeps


def check_warmup(warmup: int, num_steps: int) -> None:
    """Raise ConfigError for a critic's warm-up as long as the run; `num_steps` of 0 or less is unknown."""
    if warmup >= num_steps > 0:
        raise ConfigError(
            f"critic_warmup_steps={warmup} leaves the actor no step of the run's {num_steps}. Give fewer, or train "
            "longer."
        )


class Factors(NamedTuple):
    """The factors of the initial learning rates by optimizer step."""

    actor: Factor
    critic: Factor


def factors(args: Any, num_steps: int) -> Factors:
    """Return the factors of actor and critic; ConfigError for a schedule by metric or too long a warm-up."""
    warmup = args.critic_warmup_steps
    check_warmup(warmup, num_steps)
    actor = _factor(args, args.lr_scheduler_type, num_steps)
    critic = _factor(args, args.value_lr_scheduler_type or args.lr_scheduler_type, num_steps)
    return Factors(lambda step: 0.0 if step < warmup else actor(step), critic)


def _factor(args: Any, kind: Any, num_steps: int) -> Factor:
    stand_in = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        kind,
        optimizer=stand_in,
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs if kind == args.lr_scheduler_type else None,
    )
    if not isinstance(schedule, LambdaLR):
        raise ConfigError(
            f"The schedule '{getattr(kind, 'value', kind)}' follows a metric and has no factor by step, which "
            "critic_warmup_steps and value_lr_scheduler_type need. Take linear, cosine or constant."
        )
    return schedule.lr_lambdas[0]


@dataclass(eq=False)
class ActorWaits(TrainerCallback):
    """Callback that keeps the actor's step count in the optimizer at 0 in the first `num_steps` optimizer steps."""

    num_steps: int

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Overrides TrainerCallback.on_train_begin: sets the count back after each step of the warm-up.

        Args:
            args, control, kwargs: Not read.
            state: The trainer's; `global_step` is the number of finished steps.
            optimizer: The trainer's, in any wrappers.
        """
        while hasattr(optimizer, "optimizer"):  # wrappers of accelerate and DeepSpeed
            optimizer = optimizer.optimizer

        def set_back(stepped: Any, *_: Any) -> None:
            groups = stepped.param_groups if state.global_step < self.num_steps else []
            for weight in (p for group in groups if not group.get(OF_CRITIC) for p in group["params"]):
                if "step" in stepped.state[weight]:
                    stepped.state[weight]["step"] *= 0  # a number or a tensor

        optimizer.register_step_post_hook(set_back)

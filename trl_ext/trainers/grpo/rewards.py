"""A reward function that raises fails all ranks together, with its name, instead of one rank alone.

TRL gathers the rewards of all ranks. A rank whose reward function raised never gets there, and the others wait for it
until the process group times out, 30 minutes later. So an exception is kept until after that gather, and then raised
on every rank.
"""

import math
import traceback
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from torch import nn
from transformers.utils import logging
from trl.trainer.utils import is_async_callable

from trl_ext.errors import RuleError, TrlExtError

logger = logging.get_logger(__name__)


class GuardedReward:
    """Calls a reward function, keeps its exception, and lets no infinity through.

    Args:
        function: Called with TRL's arguments, returns one float or None a completion.
        name: For messages.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.error: Exception | None = None

    def __call__(self, **kwargs: Any) -> list[float | None]:
        try:
            return self._checked(self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # whatever user code raises: it is raised again on all ranks
            return self._keep(error, len(kwargs["completions"]))

    def _checked(self, rewards: Any, expected: int) -> list[float | None]:
        values = list(rewards)
        if len(values) != expected:
            raise RuleError(
                f"The reward '{self.name}' returned {len(values)} values for {expected} completions. "
                "Return one float, or None, per completion."
            )
        finite = [v if v is None or math.isfinite(v) else None for v in values]
        if finite != values:
            logger.warning_once(
                f"The reward '{self.name}' returned NaN or infinity; such completions count as not scored. "
                "One infinite reward would turn the weights into NaN."
            )
        return finite

    def _keep(self, error: Exception, expected: int) -> list[float | None]:
        self.error = error
        return [0.0] * expected


class AsyncGuardedReward(GuardedReward):
    """The same for `async def` reward functions, which TRL awaits together."""

    async def __call__(self, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        try:
            return self._checked(await self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # as above
            return self._keep(error, len(kwargs["completions"]))


def guard(function: Any, name: str) -> Any:
    """The reward function behind a guard; reward models, which run on the device, pass as they are."""
    if isinstance(function, nn.Module):
        return function
    return (AsyncGuardedReward if is_async_callable(function) else GuardedReward)(function, name)


def raise_together(rewards: list[Any], num_processes: int, rank: int) -> None:
    """Raise on every rank when a reward function raised on any. Collective: call it on all ranks.

    Raises:
        RuleError: with the name, the rank and the traceback of each failure.
    """
    errors = [(r.name, r.error) for r in rewards if getattr(r, "error", None) is not None]
    messages = [f"On rank {rank} the reward '{name}' raised:\n{_describe(error)}" for name, error in errors]
    if num_processes > 1:
        messages = gather_object(messages)
    if messages:
        raise RuleError("\n".join(messages)) from (errors[0][1] if errors else None)


def _describe(error: Exception) -> str:
    # Our own errors say all there is to say in their sentence, and carry the cause's traceback themselves.
    if isinstance(error, TrlExtError) and error.__cause__ is None:
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()

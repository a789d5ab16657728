"""The hooks of a critic in GRPOTrainer's step; GRPO has no critic, and PPO's implements them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trl_ext.packing.check import CheckResult
from trl_ext.trainers.fit.rehearsal.inputs import MicroBatch
from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.step.forward import Forward


class CriticHooks(RolloutPart):
    """The hooks of a critic, in addition to the hooks of a part; here they change nothing.

    Args:
        models: The critic's models that forward flat rows, unwrapped.

    Attributes:
        num_passes: Forwards of each row that the critic adds to an update.
        why_all_rows_count: Why rows of zero advantage are trained on; "" if the critic does not need them.
    """

    num_passes = 0
    why_all_rows_count = ""

    def __init__(self, models: Sequence[Any] = ()):
        self.models = list(models)

    def self_check(self, result: CheckResult) -> CheckResult:
        """Return the result of packing's self-check for policy and critic, given the policy's."""
        return result

    def by_role(self, weights: list[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        """Return the trained model's weights by the role of the model that they belong to."""
        return {"model": weights}

    def scoring(self, model: Any, width: int) -> AbstractContextManager[None]:
        """Enclose a padded forward of `model` that scores `width` completion tokens of each row."""
        return nullcontext()

    def begin_micro_step(self, forwards: Sequence[Forward]) -> None:
        """Read the forwards of a micro-step before the policy trains on them."""

    def train(self, actor: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Train a critic with a separate optimizer, after the policy's backward; return [] the sum of both losses.

        `actor` is the policy as training calls it.
        """
        return loss

    def with_columns(self, batch: MicroBatch) -> MicroBatch:
        """Return the rehearsal's micro-batch with all columns that an update reads."""
        return batch

    @contextmanager
    def rehearsing(self, batch: MicroBatch) -> Iterator[None]:
        """Enclose the policy's step on the rehearsal's micro-batch."""
        yield

    def check_checkpoint(self, folder: str) -> None:
        """Raise ConfigError for a checkpoint from which this critic cannot resume."""

    def load_weights(self, folder: str, *, are_loaded: bool) -> None:
        """Load the critic of a checkpoint; `are_loaded`: with the policy's weights the critic's are loaded already."""

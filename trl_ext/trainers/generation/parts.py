"""Features of a GRPO trainer's rollouts; each implements the hooks that it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.step.score import LogProbs

Rows = list[dict[str, Any]]


class RolloutPart:
    """A feature in the trainer's list of parts, called in the list's order. The hooks here do nothing.

    `trainer.model.training` is False in an evaluation.
    """

    def before_generation(self, trainer: RolloutTrainer, rows: Rows) -> Rows:
        """Return this process's rows of the generation that begins. Collective."""
        return rows

    @contextmanager
    def generating(self, trainer: RolloutTrainer) -> Iterator[None]:
        """Enclose TRL's generation."""
        yield

    def rewarded(self, trainer: RolloutTrainer, totals: torch.Tensor) -> None:
        """Read the total rewards of a training generation, [rows of all ranks], NaN where nothing was scored."""

    def add_rewards(
        self, trainer: RolloutTrainer, prompts: list[Any], completions: list[Any], rewards: torch.Tensor
    ) -> torch.Tensor:
        """Return the rewards with a column for each function that TRL does not call. Collective.

        Args:
            trainer: The trainer.
            prompts, completions: Of this process, as reward functions get them.
            rewards: [rows of all ranks, functions], NaN where a function abstains.
        """
        return rewards

    def after_generation(self, trainer: RolloutTrainer, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's scored rollouts, or the rollouts to train on instead. Collective."""
        return rollouts

    def after_scoring(self, trainer: RolloutTrainer, result: LogProbs) -> None:
        """Read the log-probabilities of a forward, which has a gradient in an update."""

    def after_loss(self, trainer: RolloutTrainer, inputs: dict[str, Any]) -> None:
        """Read the rows of a forward whose loss was computed."""

    def step_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an optimizer step, including this part's."""
        return values

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the part's metrics over all batches of the evaluation that ends. Collective."""
        return {}

    def save(self, trainer: RolloutTrainer, folder: str) -> None:
        """Write the part's state into a checkpoint."""

    def load(self, trainer: RolloutTrainer, checkpoint: str) -> None:
        """Read the part's state from the checkpoint of a run that is resumed."""

    def begin(self, trainer: RolloutTrainer, checkpoint: str | None, *, has_rollouts: bool) -> None:
        """Begin a run after `load`; `has_rollouts`: unused rollouts were restored from the checkpoint."""

"""Features of a GRPO trainer's rollouts, each of which implements the hooks that it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Rows = list[dict[str, Any]]


class RolloutPart:
    """A feature that the trainer has in its list of parts, and calls in the list's order. Here no hook does anything.

    Args of hooks:
        trainer: Whose part it is. `trainer.model.training` is False in an evaluation.
    """

    def before_generation(self, trainer: Any, rows: Rows) -> Rows:
        """Return this process's rows of the generation that begins. Collective."""
        return rows

    @contextmanager
    def generating(self, trainer: Any) -> Iterator[None]:
        """Surround TRL's generation."""
        yield

    def rewarded(self, trainer: Any, totals: torch.Tensor) -> None:
        """Look at the total rewards of a generation in training, [rows of all ranks], NaN where nothing scored."""

    def after_generation(self, trainer: Any, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's scored rollouts, or what is trained on in their place. Collective."""
        return rollouts

    def after_loss(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """Look at the rows of a forward whose loss was computed."""

    def step_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an optimizer step, with this part's."""
        return values

    def save(self, trainer: Any, folder: str) -> None:
        """Write the part's state into a checkpoint."""

    def load(self, trainer: Any, checkpoint: str | None, *, has_rollouts: bool) -> None:
        """Begin a run, or go on with one.

        Args:
            trainer: As above.
            checkpoint: None for a run from the start.
            has_rollouts: Whether rollouts that are not used up were restored from it.
        """

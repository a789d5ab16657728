"""The scale of the critic's predictions, which follows the returns, so that large scores make no large value loss.

    value = mean + std * output of the critic          loss on (return - mean) / std

With returns 20 times larger, the critic's outputs, loss and gradients do not change. Mean and standard deviation
follow the rewards to come in each batch of rollouts, which do not depend on values. They are updated before a batch's
values are used, so that old values, advantages and loss of an update share one scale.

A critic that starts from a reward model has outputs on that model's scale. They are shifted to mean 0 and scaled to
their correlation with the first batch's rewards to come, once, by least squares: a reward model that judges unfinished
text badly then does not mislead at the start.

Source: arXiv:1602.07714 (adaptive rescaling of targets; here the head's weights are not rescaled).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trl_ext.trainers.ppo.objective.equations import wide

_STATE = ("weight", "mean", "square", "offset", "spread")
_RATE = 0.1  # share of a new batch in the running moments
_LEAST_SLOPE = 0.5  # With less, the gradients of the outputs are small, and the critic learns slowly.
_LEAST_SPREAD = 1e-6  # A standard deviation below this part of the largest value is rounding, and not a scale.


@dataclass(slots=True)
class ValueScale:
    """Running mean and standard deviation of the rewards to come; fixed at 0 and 1 if `is_running` is False."""

    is_running: bool = True
    _weight: float = 0.0
    _mean: float = 0.0
    _square: float = 0.0
    _offset: float = 0.0  # of the critic's outputs in the first batch
    _spread: float = 1.0

    @property
    def has_begun(self) -> bool:
        """Return True once a batch has set the scale."""
        return self._weight > 0

    @property
    def mean(self) -> float:
        return self._mean / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        square = self._square / self._weight
        variance = square - self.mean**2
        return variance**0.5 if variance > square * _LEAST_SPREAD**2 else 1.0

    @property
    def line(self) -> dict[str, float]:
        """Return `intercept` and `slope`: for a saved critic's output o the value is intercept + slope x o."""
        slope = self.std / self._spread
        return {"intercept": self.mean - slope * self._offset, "slope": slope}

    def follow(self, to_come: torch.Tensor, mask: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Update with a batch: `to_come` [B, T] the rewards from each token on, `mask` [B, T] 1 where a token counts.

        `total` sums a tensor over ranks. Collective if the scale is running.
        """
        if not self.is_running:
            return
        kept = torch.where(mask.bool(), wide(to_come), 0.0)
        count, first, second = total(torch.stack([wide(mask).sum(), kept.sum(), kept.square().sum()])).tolist()
        if not count:
            return
        self._weight += _RATE * (1 - self._weight)
        self._mean += _RATE * (first / count - self._mean)
        self._square += _RATE * (second / count - self._square)

    def centre(
        self,
        outputs: torch.Tensor,
        to_come: torch.Tensor,
        mask: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Fit the critic's `outputs` [B, T] in the first batch to the rewards to come, by a line; later do nothing.

        Collective in the first batch.

        Args:
            outputs: [B, T] of the critic.
            to_come: [B, T] the rewards to come.
            mask: [B, T] 1 for counted tokens.
            total: Sums a tensor over ranks.
        """
        if self._weight:
            return
        x, y = (torch.where(mask.bool(), wide(one), 0.0) for one in (outputs, to_come))
        sums = torch.stack([wide(mask).sum(), *(one.sum() for one in (x, y, x * x, y * y, x * y))])
        count, of_x, of_y, x_x, y_y, x_y = total(sums).tolist()
        spread = x_x - of_x**2 / max(count, 1)
        if spread <= x_x * _LEAST_SPREAD**2:
            return
        product, other = x_y - of_x * of_y / count, max(y_y - of_y**2 / count, 0.0)
        correlation = product / (spread * other) ** 0.5 if other else 0.0
        self._offset, self._spread = of_x / count, (spread / count) ** 0.5 / max(correlation, _LEAST_SLOPE)

    def standardised(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the critic's outputs on the scale of the loss: unchanged, unless `centre` has shifted and scaled."""
        return outputs if (self._offset, self._spread) == (0.0, 1.0) else (outputs - self._offset) / self._spread

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the values of standardised outputs."""
        return self.mean + self.std * outputs if self._weight else outputs

    def outputs(self, values: torch.Tensor) -> torch.Tensor:
        """Return the standardised outputs for these values: the inverse of `values`."""
        return (values - self.mean) / self.std if self._weight else values

    def metrics(self) -> dict[str, float]:
        """Return mean and standard deviation, if the scale is running."""
        return {"ppo/value_scale_mean": self.mean, "ppo/value_scale_std": self.std} if self.is_running else {}

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name in _STATE:
            setattr(self, f"_{name}", float(state[name]))

"""How far the critic's values were from the returns.

Legend: B rows, T completion tokens.
"""

from dataclasses import dataclass

import torch

from trl_ext.rewards.totals.moments import Moments
from trl_ext.trainers.ppo.equations import LEAST_SPREAD, Total, moments, wide


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """Moments of the returns, and of the returns less the values; those of several batches can be merged."""

    returns: Moments
    errors: Moments

    @classmethod
    def of(cls, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total: Total) -> "ValueErrors":
        """Measure one batch over all ranks. Collective.

        Args:
            values, returns: [B, T] the critic's values and what they should have been.
            mask: [B, T] 1 where a token counts.
            total: Sums a tensor over ranks; called twice.
        """
        pair = torch.stack([wide(returns), wide(returns) - wide(values)])
        count, means, squares = moments(pair, wide(mask).bool(), total)
        pairs = zip(means.nan_to_num().tolist(), squares.tolist(), strict=True)
        return cls(*(Moments(count.item(), mean, square) for mean, square in pairs))

    def merged(self, other: "ValueErrors") -> "ValueErrors":
        """Return the moments of both together."""
        return ValueErrors(self.returns.merged(other.returns), self.errors.merged(other.errors))

    def metrics(self) -> dict[str, float]:
        """Return the explained variance: 1 - Var(return - value) / Var(return).

        It is 1 where the critic foresees all, 0 where it is as good as a constant or returns do not vary, and below 0
        where it is worse.
        """
        returns = self.returns
        varies = returns.squares > returns.count * (LEAST_SPREAD * returns.mean) ** 2
        return {"ppo/explained_variance": 1 - self.errors.squares / returns.squares if varies else 0.0}

    def mean_square(self) -> float:
        """Return the mean squared error over all tokens; 0 without a token."""
        errors = self.errors
        return errors.squares / errors.count + errors.mean**2 if errors.count else 0.0

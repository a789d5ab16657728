"""How far the critic's values were from the returns, by the position of the token in its completion.

Legend: B rows, T completion tokens, K buckets of positions.
"""

from dataclasses import dataclass
from math import ceil

import torch

from trl_ext.rewards.totals.moments import Moments, merged
from trl_ext.trainers.ppo.equations import LEAST_SPREAD, Total, wide

_NUM_BUCKETS = 6
_USUAL_LENGTH = 2048  # where nothing bounds a completion
KEY = "ppo/explained_variance"


def position_buckets(max_completion_length: int | None) -> tuple[int, ...]:
    """Return the last position of each bucket: the whole length, its half, its quarter and so on, the smallest first.

    Args:
        max_completion_length: Most tokens of a completion; None where there is no bound.
    """
    longest = max_completion_length or _USUAL_LENGTH
    return tuple(sorted({ceil(longest / 2**halvings) for halvings in range(_NUM_BUCKETS)}))


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """Moments of returns and of the critic's errors, bucket by bucket; those of several batches can be merged.

    Args:
        ends: Last position of each bucket, counted from 1; later positions belong to the last one.
        returns, errors: Moments of the returns, and of the returns less the values.
    """

    ends: tuple[int, ...]
    returns: tuple[Moments, ...]
    errors: tuple[Moments, ...]

    @classmethod
    def of(
        cls, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, ends: tuple[int, ...], total: Total
    ) -> "ValueErrors":
        """Measure one batch over all ranks. Collective.

        Args:
            values, returns: [B, T] the critic's values and what they should have been.
            mask: [B, T] 1 where a token counts; the others are no positions.
            ends: As above.
            total: Sums a tensor over ranks; called twice.
        """
        counted = wide(mask).bool()
        pair = torch.stack([wide(returns), wide(returns) - wide(values)])[:, counted]
        positions = counted.cumsum(dim=1)[counted].clamp(max=ends[-1])
        bucket = torch.bucketize(positions, positions.new_tensor(ends))
        nothing = pair.new_zeros(2, len(ends))
        # Not bincount, whose size a twin does not know.
        num = nothing[0].index_add(0, bucket, torch.ones_like(pair[0]))
        # Two passes in float64: the sum of squares less the squared sum would lose everything to a large mean.
        sums = total(torch.cat([num[None], nothing.index_add(1, bucket, pair)]))
        num, means = sums[0], sums[1:] / sums[0].clamp(min=1)
        squares = total(nothing.index_add(1, bucket, (pair - means[:, bucket]).square()))
        of_returns, of_errors = (
            tuple(Moments(*one) for one in zip(num.tolist(), mean.tolist(), square.tolist(), strict=True))
            for mean, square in zip(means, squares, strict=True)
        )
        return cls(ends, of_returns, of_errors)

    def merged(self, other: "ValueErrors") -> "ValueErrors":
        """Return the moments of both together."""
        pairs = ((self.returns, other.returns), (self.errors, other.errors))
        return ValueErrors(self.ends, *(tuple(a.merged(b) for a, b in zip(*pair, strict=True)) for pair in pairs))

    def metrics(self) -> dict[str, float]:
        """Return the explained variance of all tokens, and that of each bucket in which returns vary.

        It is 1 where the critic foresees all, 0 where it is as good as a constant or returns do not vary, and below 0
        where it is worse: 1 - Var(return - value) / Var(return).
        """
        found = {KEY: _explained(merged(self.returns), merged(self.errors)) or 0.0}
        first = 1
        for end, returns, errors in zip(self.ends, self.returns, self.errors, strict=True):
            explained = _explained(returns, errors)
            if explained is not None:
                found[f"{KEY}/{first}-{end}" if first < end else f"{KEY}/{end}"] = explained
            first = end + 1
        return found

    def mean_square(self) -> float:
        """Return the mean squared error over all tokens; 0 without a token."""
        errors = merged(self.errors)
        return errors.squares / errors.count + errors.mean**2 if errors.count else 0.0


def _explained(returns: Moments, errors: Moments) -> float | None:
    """Return the explained variance; None where returns do not vary."""
    varies = returns.squares > returns.count * (LEAST_SPREAD * returns.mean) ** 2
    return 1 - errors.squares / returns.squares if varies else None

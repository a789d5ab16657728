"""From scores to advantages and returns per token. Legend: B rows, T completion tokens, K quantities.

A token counts where the mask is 1. What stands at the others, NaN included, reaches no result.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Total = Callable[[torch.Tensor], torch.Tensor]

_EPSILON = 1e-8  # Added to the variance, as in TRL 1.12's masked_whiten.
_LEAST_SPREAD = 1e-12  # A standard deviation below this part of the mean is rounding.


def shaped_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """The KL penalty at every counted token, and the score on top at the last one.

    Args:
        scores: [B] score of each completion; a NaN reaches the result unless the row has no counted token.
        kl: [B, T] KL estimate per token.
        mask: [B, T] 1 where a token counts.
        kl_coef: Weight of the KL.

    Returns:
        [B, T], 0 where mask is 0.
    """
    counted = mask.bool()
    num_from_here = counted.flip(1).cumsum(1).flip(1)
    is_last = counted & (num_from_here == 1)
    return _kept(-kl_coef * kl.float(), counted) + _kept(scores.float()[:, None].expand_as(kl), is_last)


@torch.no_grad()
def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-level advantages and returns: targets, without gradient.

    Tokens that do not count are no step in time: a row's result is that of the row with them cut out. The value after
    the last counted token is 0.

    Args:
        rewards: [B, T] reward per completion token, KL penalty included.
        values: [B, T] critic's value before each token.
        mask: [B, T] 1 where a token counts.
        gamma, lam: Discount and GAE decay, both in 0..1.

    Returns:
        advantages [B, T] and returns [B, T], 0 where mask is 0.

    Source: arXiv:1506.02438, equations 11 to 16.
    """
    counted = mask.bool()
    values_kept = _kept(values.double(), counted)
    order = counted.byte().argsort(dim=1, descending=True, stable=True)  # counted tokens first, in their order
    r, v = _kept(rewards.double(), counted).gather(1, order), values_kept.gather(1, order)
    next_v = F.pad(v[:, 1:], (0, 1))
    dense = _decayed_sums(r + gamma * next_v - v, gamma * lam)
    advantages = torch.zeros_like(dense).scatter(1, order, dense)
    return _narrow(advantages, values), _narrow(advantages + values_kept, values)


@torch.no_grad()
def whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, total: Total | None = None
) -> torch.Tensor:
    """Shift and scale to mean 0 and sample variance 1 over the counted tokens of all ranks, without gradient.

    Args:
        values: [B, T].
        mask: [B, T] 1 where a token counts.
        shift_mean: False keeps the mean.
        total: Sums a tensor over ranks. Collective: called twice, also on a rank where no token counts.

    Returns:
        [B, T], 0 where mask is 0.
    """
    counted = mask.bool()
    count, means, squares = _moments(values[None], counted, total)
    variance = squares[0] / (count - 1).clamp(min=1)
    whitened = (values.double() - means[0]) * torch.rsqrt(variance + _EPSILON)
    return _narrow(_kept(whitened if shift_mean else whitened + means[0], counted), values)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[] mean of x [B, T] over the counted tokens; 0 where none counts."""
    counted = mask.bool()
    return _narrow(_kept(x.double(), counted).sum() / counted.sum().clamp(min=1), x)


@torch.no_grad()
def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total: Total | None = None
) -> torch.Tensor:
    """[] how much of the returns' variance the critic explains: 1 all, 0 as much as a constant, below 0 less.

    Args:
        values, returns: [B, T] the critic's values and what they should have been.
        mask: [B, T] 1 where a token counts.
        total: As in `whiten`.

    Returns:
        1 - Var(returns - values) / Var(returns) over the counted tokens of all ranks; 0 where the returns do not vary.
    """
    pair = torch.stack([returns.double() - values.double(), returns.double()])
    count, means, squares = _moments(pair, mask.bool(), total)
    varies = squares[1] > count * (_LEAST_SPREAD * means[1]).square()
    return _narrow(torch.where(varies, 1 - squares[0] / squares[1], 0.0), values)


def _moments(
    x: torch.Tensor, counted: torch.Tensor, total: Total | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count [], means [K] and sums of squared deviations [K] of x [K, B, T] over the counted tokens of all ranks.

    Two passes in float64: the sum of squares less the squared sum would lose everything to a large mean.
    """
    total = total or (lambda tensor: tensor)
    x = x.double()
    sums = total(torch.cat([counted.sum().double()[None], _kept(x, counted).sum((1, 2))]))
    count, means = sums[0], sums[1:] / sums[0]  # NaN where nothing counts: no token is there to show it
    squares = total(_kept(x - means[:, None, None], counted).square().sum((1, 2)))
    return count, means, squares


def _decayed_sums(x: torch.Tensor, decay: float) -> torch.Tensor:
    """[B, T] sum over k of decay**k * x[:, t + k]."""
    # Each turn doubles the window, so that 8192 tokens take 13 turns, where a loop over tokens takes 8192.
    shift = 1
    while shift < x.shape[1]:
        x = x + decay**shift * F.pad(x[:, shift:], (0, shift))
        shift *= 2
    return x


def _kept(x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, x, 0.0)  # a product would let NaN and infinity through


def _narrow(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In the dtype of `like`, in float32 where that is narrower."""
    return x.to(torch.promote_types(like.dtype, torch.float32))

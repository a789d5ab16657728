"""PPO's equations: KL penalty, rewards, advantages, returns and the critic's loss.

Advantages are made of a critic's values (`gae`), or with another baseline:

    gae            r_t + gamma V_{t+1} - V_t, decayed by gamma lam; whitened over all tokens        arXiv:1506.02438
    reinforce_pp   rewards to come, sum of gamma^k r_{t+k}; whitened over all tokens                arXiv:2501.03262
    rloo           the completion's total reward less the mean of its group's other completions     arXiv:2402.14740
    grpo           the completion's total reward less its group's mean, over its group's std        arXiv:2402.03300
    remax          rewards to come, less the total reward of the prompt's greedy completion         arXiv:2310.10505

The rewards include the KL penalty. A turn's reward is at its last token, not at the end of the completion.

Legend: B rows, T completion tokens, K quantities, N rows of all ranks, G completions of a prompt. A token counts where
the mask is 1. Values at other tokens, NaN included, do not change any result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trl_ext.errors import RuleError
from trl_ext.trainers.generation.groups import equal_groups

Total = Callable[[torch.Tensor], torch.Tensor]

ESTIMATORS = ("k1", "k2", "k3")
ADVANTAGES = ("gae", "reinforce_pp", "rloo", "grpo", "remax")
OF_GROUPS = ("rloo", "grpo")  # an advantage per completion, compared with the others of its prompt
PER_TOKEN = ("gae", "reinforce_pp")  # an advantage per token, to which gamma applies

_MOST_ERROR = 0.2  # Ziegler et al. bound the relative error of one update to this on either side.
_EPSILON = 1e-8  # Added to the variance, as in TRL 1.12's masked_whiten.
_GROUP_EPSILON = 1e-6  # Added to a group's standard deviation, as in verl.
LEAST_SPREAD = 1e-12  # A standard deviation below this part of the mean is rounding.


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled.

    The mean of k1 and k3 is the KL, the mean of k2 is near it. Their gradients depend on where they are added:

                in the reward                                       in the loss
        k1      KL(policy || reference)                             0
        k2      does not restrain the policy near the reference     KL(policy || reference)
        k3      KL(policy || reference) - KL(reference || policy)   KL(reference || policy)

    In the reward only k1 has the KL's gradient; the gradient of k3 vanishes to second order near the reference.

    Args:
        logps, ref_logps: [B, T] log-probabilities of the tokens under the policy and the reference.
        estimator: "k1" is the log-ratio, of either sign; "k2" half its square; "k3" is never negative and mostly
            varies less than k1.

    Returns:
        [B, T] in float32, nats.

    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = ref_logps.float() - logps.float()
    # expm1, because near the reference exp(x) - 1 is mostly rounding.
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    return -log_ratio if estimator == "k1" else 0.5 * log_ratio.square()


@dataclass(slots=True)
class AdaptiveKL:
    """The KL coefficient, adapted so that the policy keeps a given distance from the reference.

    Args:
        value: The current coefficient.
        target: Target KL of a completion, in nats; None keeps the coefficient fixed.
        horizon: Episodes over which a KL that is 20 % or more off changes the coefficient by about 20 %.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000

    def update(self, kl: float, num_episodes: int) -> None:
        """Adapt the coefficient after a batch of `num_episodes` completions of all ranks; a NaN KL changes nothing.

        `kl` is the mean over the completions of all ranks of the KL summed over their tokens.
        """
        if self.target is None:
            return
        error = float(kl) / self.target - 1
        if not isnan(error):
            self.value *= 1 + min(max(error, -_MOST_ERROR), _MOST_ERROR) * num_episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved coefficient; a fixed coefficient is a setting and stays unchanged."""
        if self.target is not None:
            self.value = float(state["value"])


def shaped_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """Return [B, T] rewards: the KL penalty at each counted token, plus the score at the last; 0 where mask is 0.

    Args:
        scores: [B] score of each completion; a NaN reaches the result unless the row has no counted token.
        kl: [B, T] KL estimate per token.
        mask: [B, T] 1 where a token counts.
        kl_coef: Weight of the KL.
    """
    counted = mask.bool()
    num_from_here = counted.flip(1).cumsum(1).flip(1)
    is_last = counted & (num_from_here == 1)
    return _kept(-kl_coef * kl.float(), counted) + _kept(scores.float()[:, None].expand_as(kl), is_last)


class Targets(NamedTuple):
    """The targets of policy and critic, per token: [B, T] each, 0 where the mask is 0."""

    advantages: torch.Tensor
    returns: torch.Tensor


@torch.no_grad()
def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> Targets:
    """Return advantages and returns per token, without gradient.

    Tokens that do not count are skipped, as if they were cut out of the row. The value after the last counted token
    is 0.

    Args:
        rewards: [B, T] reward per completion token, KL penalty included.
        values: [B, T] critic's value before each token.
        mask: [B, T] 1 where a token counts.
        gamma, lam: Discount and GAE decay, both in 0..1.

    Source: arXiv:1506.02438, equations 11 to 16.
    """
    counted, wide_values, wide_rewards = wide(mask).bool(), wide(values), wide(rewards)
    values_kept = _kept(wide_values, counted)
    order = counted.byte().argsort(dim=1, descending=True, stable=True)  # counted tokens first, in their order
    r, v = _kept(wide_rewards, counted).gather(1, order), values_kept.gather(1, order)
    next_v = F.pad(v[:, 1:], (0, 1))
    dense = _decayed_sums(r + gamma * next_v - v, gamma * lam)
    advantages = torch.zeros_like(dense).scatter(1, order, dense)
    return Targets(_narrow(advantages, values), _narrow(advantages + values_kept, values))


def rewards_to_come(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return [B, T] the discounted sum of rewards [B, T] from each counted token on; 0 at other tokens."""
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0).advantages


def less_the_others(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total reward less the mean of the other totals of its group; NaN stays NaN.

    `totals` are [N], ordered by group; means ignore NaN. A completion whose group has no other total gets 0.
    """
    grouped = totals.view(-1, group_size)
    num_others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    others = (grouped.nansum(dim=1, keepdim=True) - grouped) / num_others.clamp(min=1)
    return _zero_where_equal(grouped - others, grouped)


def standardised(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total reward less its group's mean, over its group's sample standard deviation; NaN stays NaN.

    `totals` are [N], ordered by group; means ignore NaN. A completion whose group has no other total gets 0.
    """
    grouped = totals.view(-1, group_size)
    num = (~grouped.isnan()).sum(dim=1, keepdim=True)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    variance = centred.square().nansum(dim=1, keepdim=True) / (num - 1).clamp(min=1)
    return _zero_where_equal(centred / (variance.sqrt() + _GROUP_EPSILON), grouped)


def _zero_where_equal(advantages: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Return [N] advantages, 0 in groups of equal totals; NaN stays NaN. Both arguments are [groups, G]."""
    is_equal = equal_groups(totals.reshape(-1, 1), totals.size(1))[:, None]
    return advantages.masked_fill(is_equal & ~totals.isnan(), 0.0).view(-1)


def spread_over_tokens(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B, T] each row's advantage [B] at its counted tokens; 0 elsewhere, and in rows with NaN."""
    return torch.where(mask.bool(), advantages.nan_to_num(nan=0.0)[:, None], 0.0)


def moved_to_turns(
    turns: Sequence[Sequence[float] | None], weight: float, mask: torch.Tensor, name: str
) -> torch.Tensor:
    """Return [B, T] the change of token rewards if a reward moves from each row's last token to its turns.

    Each row adds up to 0. A turn is a run of counted tokens, without tokens of a tool or an environment in between.

    Args:
        turns: [B] values of each row's turns in order; None: the row has one reward for the whole completion.
        weight: Weight of the reward function.
        mask: [B, T] 1 where a token was sampled by the policy.
        name: Name of the reward function, for messages.

    Raises:
        RuleError: for a completion with another number of turns than values.
    """
    is_end = mask.bool() & ~F.pad(mask[:, 1:], (0, 1)).bool()
    moved = torch.zeros(mask.shape, device=mask.device)
    for row, values in enumerate(turns):
        ends = is_end[row].nonzero()[:, 0]
        if values is None or not len(ends):  # a row without counted tokens has no part in the loss
            continue
        if len(values) != len(ends):
            raise RuleError(
                f"The reward '{name}' returned {len(values)} values for a completion of {len(ends)} turns. Return one "
                "number for each turn of the policy, or one for the whole completion."
            )
        moved[row, ends] = weight * torch.tensor(values, device=moved.device)
        moved[row, ends[-1]] -= weight * sum(values)
    return moved


@torch.no_grad()
def whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, total: Total | None = None
) -> torch.Tensor:
    """Return [B, T] with mean 0 and sample variance 1 over the counted tokens of all ranks; 0 where mask is 0.

    Args:
        values: [B, T].
        mask: [B, T] 1 where a token counts.
        shift_mean: False keeps the mean.
        total: Sums a tensor over ranks. Collective: called twice, also on a rank where no token counts.
    """
    counted, wide_values = wide(mask).bool(), wide(values)
    count, means, squares = moments(wide_values[None], counted, total)
    variance = squares[0] / (count - 1).clamp(min=1)
    whitened = (wide_values - means[0]) * torch.rsqrt(variance + _EPSILON)
    return _narrow(_kept(whitened if shift_mean else whitened + means[0], counted), values)


class TokenMoments(NamedTuple):
    """Moments of K series over all ranks' counted tokens, in float64."""

    num_tokens: torch.Tensor  # []
    means: torch.Tensor  # [K]; NaN if no token counts
    squares: torch.Tensor  # [K] sums of squared deviations from the means


def moments(x: torch.Tensor, counted: torch.Tensor, total: Total | None) -> TokenMoments:
    """Return the moments of x [K, B, T] over the tokens of all ranks that `counted` [B, T] marks.

    It takes two passes in float64: the sum of squares less the squared sum loses all digits if the mean is large.
    """
    total = total or (lambda tensor: tensor)
    sums = total(torch.cat([counted.sum().double()[None], _kept(x, counted).sum((1, 2))]))
    count, means = sums[0], sums[1:] / sums[0]  # NaN if no token counts, and then no result uses it
    squares = total(_kept(x - means[:, None, None], counted).square().sum((1, 2)))
    return TokenMoments(count, means, squares)


def _decayed_sums(x: torch.Tensor, decay: float) -> torch.Tensor:
    """Return [B, T] the sum over k of decay**k * x[:, t + k]."""
    # Each iteration doubles the window, so that 8192 tokens take 13 iterations.
    shift = 1
    while shift < x.shape[1]:
        x = x + decay**shift * F.pad(x[:, shift:], (0, shift))
        shift *= 2
    return x


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float64, on the CPU if its device has no float64 (Apple's)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _kept(x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, x, 0.0)  # a product would keep NaN and infinity


def _narrow(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return x on the device of `like`, in its dtype but at least float32."""
    return x.to(torch.promote_types(like.dtype, torch.float32)).to(like.device)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The value loss of a micro-batch, [] with gradient, and [] the number of tokens without gradient due to clipping.

    Both add up over micro-batches and ranks.
    """

    loss: torch.Tensor
    num_clipped: torch.Tensor


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float | None,
    normalizer: torch.Tensor | float,
) -> ValueLoss:
    """Return half the larger squared error of the value and of the value clipped around its old value.

    Args:
        values: [B, T] the critic's current values.
        old_values: [B, T] its values when the completions were sampled.
        returns: [B, T] the targets of the values.
        mask: [B, T] 1 where a token counts; other tokens, NaN included, reach neither loss nor gradient.
        cliprange_value: Largest distance from the old value before clipping; None never clips.
        normalizer: Positive divisor of the sum over tokens: the counted tokens of the whole batch.

    Source: OpenAI baselines, ppo2/model.py; arXiv:2005.12729, section 3, item 1 (value function clipping).
    """
    counted = mask.bool()
    # Before the arithmetic: the gradient of a NaN that is masked afterwards is NaN.
    values, old_values, returns = (torch.where(counted, x.float(), 0.0) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if cliprange_value is None:
        return ValueLoss(0.5 * errors.sum() / normalizer, counted.new_zeros((), dtype=torch.long))
    clipped = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    clipped_errors = (clipped - returns).square()
    loss = 0.5 * torch.maximum(errors, clipped_errors).sum() / normalizer
    return ValueLoss(loss, (clipped_errors > errors).sum())

"""From rewards per token to advantages per token: with a critic (`gae`) or with a baseline in its place.

    gae            r_t + gamma V_{t+1} - V_t, decayed by gamma lam; whitened over all tokens        arXiv:1506.02438
    reinforce_pp   what is still to come, sum of gamma^k r_{t+k}; whitened over all tokens          arXiv:2501.03262
    rloo           the completion's whole reward less the mean of its group's other completions     arXiv:2402.14740
    grpo           the completion's whole reward, its group's mean taken off, over its group's std  arXiv:2402.03300
    remax          what is still to come, less the whole reward of the prompt's greedy completion   arXiv:2310.10505

The KL penalty is part of the rewards in all of them. Rewards per turn stand at the last token of the turn that earned
them, not at the end of the completion. Legend: B rows, T completion tokens, N rows of all ranks, G completions of a
prompt.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trl_ext.errors import RuleError
from trl_ext.trainers.ppo.objective.equations import generalized_advantages

ADVANTAGES = ("gae", "reinforce_pp", "rloo", "grpo", "remax")
OF_GROUPS = ("rloo", "grpo")  # one advantage a completion, compared with the others of its prompt
PER_TOKEN = ("gae", "reinforce_pp")  # one a token; gamma has a meaning
_EPSILON = 1e-6  # Added to a group's standard deviation, as in verl.


def rewards_to_come(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return [B, T] the discounted sum of a row's rewards from each counted token on, 0 where mask is 0.

    Args:
        rewards: [B, T] reward per completion token, KL penalty included.
        mask: [B, T] 1 where a token counts; the others are no step in time.
        gamma: Discount per token, in 0..1.
    """
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def less_the_others(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total less the mean of the other totals of its group; NaN where a total is NaN.

    Args:
        totals: [N] whole rewards of completions, groups side by side. NaN counts in no mean.
        group_size: G. A completion whose group has no other total has the advantage 0: nothing compares it.
    """
    grouped = totals.view(-1, group_size)
    num_others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    others = (grouped.nansum(dim=1, keepdim=True) - grouped) / num_others.clamp(min=1)
    return torch.where((num_others < 1) & ~grouped.isnan(), 0.0, grouped - others).view(-1)


def standardised(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total less its group's mean, over its group's sample standard deviation; NaN stays NaN.

    Args:
        totals: [N] whole rewards of completions, groups side by side. NaN counts in no mean.
        group_size: G. A completion whose group has no other total has the advantage 0.
    """
    grouped = totals.view(-1, group_size)
    num = (~grouped.isnan()).sum(dim=1, keepdim=True)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    variance = centred.square().nansum(dim=1, keepdim=True) / (num - 1).clamp(min=1)
    return (centred / (variance.sqrt() + _EPSILON)).view(-1)


def spread_over_tokens(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B, T] each row's one advantage [B] at its counted tokens; 0 elsewhere, and in a row whose own is NaN."""
    return torch.where(mask.bool(), advantages.nan_to_num(nan=0.0)[:, None], 0.0)


def moved_to_turns(
    turns: Sequence[Sequence[float] | None], weight: float, mask: torch.Tensor, name: str
) -> torch.Tensor:
    """Return [B, T] what rewards change when a reward function's total, at each row's last token, moves to its turns.

    A turn is what the policy said without a word of a tool or an environment in between: a run of counted tokens.

    Args:
        turns: [B] values of each row's turns, the first turn first; None: its reward is that of the whole completion.
        weight: Of the reward function.
        mask: [B, T] 1 where a token was sampled by the policy.
        name: Of the reward function, for messages.

    Returns:
        [B, T], each row of which adds up to 0.

    Raises:
        RuleError: for a completion with another number of turns than values.
    """
    is_end = mask.bool() & ~F.pad(mask[:, 1:], (0, 1)).bool()
    moved = torch.zeros(mask.shape, device=mask.device)
    for row, values in enumerate(turns):
        ends = is_end[row].nonzero()[:, 0]
        if values is None or not len(ends):  # a row without counted tokens is in no loss
            continue
        if len(values) != len(ends):
            raise RuleError(
                f"The reward '{name}' returned {len(values)} values for a completion of {len(ends)} turns. Return one "
                "number for each turn of the policy, or one for the whole completion."
            )
        moved[row, ends] = weight * torch.tensor(values, device=moved.device)
        moved[row, ends[-1]] -= weight * sum(values)
    return moved

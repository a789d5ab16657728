"""Advantages per token from rewards per token: with a critic (`gae`) or with another baseline.

    gae            r_t + gamma V_{t+1} - V_t, decayed by gamma lam; whitened over all tokens        arXiv:1506.02438
    reinforce_pp   rewards to come, sum of gamma^k r_{t+k}; whitened over all tokens                arXiv:2501.03262
    rloo           the completion's total reward less the mean of its group's other completions     arXiv:2402.14740
    grpo           the completion's total reward less its group's mean, over its group's std        arXiv:2402.03300
    remax          rewards to come, less the total reward of the prompt's greedy completion         arXiv:2310.10505

The rewards include the KL penalty. A turn's reward is at its last token, not at the end of the completion.
Legend: B rows, T completion tokens, N rows of all ranks, G completions of a prompt.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trl_ext.errors import RuleError
from trl_ext.trainers.ppo.objective.equations import generalized_advantages

ADVANTAGES = ("gae", "reinforce_pp", "rloo", "grpo", "remax")
OF_GROUPS = ("rloo", "grpo")  # an advantage per completion, compared with the others of its prompt
PER_TOKEN = ("gae", "reinforce_pp")  # an advantage per token, to which gamma applies
_EPSILON = 1e-6  # Added to a group's standard deviation, as in verl.


def rewards_to_come(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return [B, T] the discounted sum of rewards [B, T] from each counted token on; 0 at other tokens."""
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def less_the_others(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total reward less the mean of the other totals of its group; NaN stays NaN.

    `totals` are [N], ordered by group; means ignore NaN. A completion whose group has no other total gets 0.
    """
    grouped = totals.view(-1, group_size)
    num_others = (~grouped.isnan()).sum(dim=1, keepdim=True) - 1
    others = (grouped.nansum(dim=1, keepdim=True) - grouped) / num_others.clamp(min=1)
    return torch.where((num_others < 1) & ~grouped.isnan(), 0.0, grouped - others).view(-1)


def standardised(totals: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [N] each total reward less its group's mean, over its group's sample standard deviation; NaN stays NaN.

    `totals` are [N], ordered by group; means ignore NaN. A completion whose group has no other total gets 0.
    """
    grouped = totals.view(-1, group_size)
    num = (~grouped.isnan()).sum(dim=1, keepdim=True)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    variance = centred.square().nansum(dim=1, keepdim=True) / (num - 1).clamp(min=1)
    return (centred / (variance.sqrt() + _EPSILON)).view(-1)


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

"""Rewards per turn: each stands at the last token of the turn that earned it, not at the end of the completion.

A turn is what the policy said without a word of a tool or an environment in between: a run of counted tokens.

Legend: B rows, T completion tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trl_ext.errors import RuleError

Turns = Sequence[float] | None  # of a completion, first turn first; None: its reward is that of the whole


def moved_to_turns(turns: Sequence[Turns], weight: float, mask: torch.Tensor, name: str) -> torch.Tensor:
    """Return [B, T] what rewards change when a reward function's total, at each row's last token, moves to its turns.

    Args:
        turns: [B] values of each row's turns.
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

"""Groups whose completions earn equal rewards: none of them has an advantage, and there is nothing to learn.

In float32 the standard deviation of eight rewards of 0.7 is 6e-8, and TRL makes advantages of it. Whether the rewards
of a group are equal is decided here alone: for advantages, `frac_reward_zero_std`, `oversample` and skipped rows.
"""

from typing import Any

import torch

from trl_ext.trainers.generation.trainer import RolloutTrainer

ROUNDING = 1e-6  # A smaller part of a reward's size is rounding, and not a difference.


def total_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each completion's weighted sum of rewards [rows of all ranks, functions]; NaN if no function scored."""
    totals = (rewards * weights.to(rewards.device)).nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = torch.nan
    return totals


def equal_groups(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return [groups], True where a group's rewards are equal up to rounding, in each of K columns.

    `rewards` are [N, K], ordered by group; NaN, where nothing was scored, is left out.
    """
    grouped = rewards.unflatten(0, (-1, group_size))
    is_nan = grouped.isnan()
    largest = grouped.masked_fill(is_nan, -torch.inf).amax(dim=1)
    smallest = grouped.masked_fill(is_nan, torch.inf).amin(dim=1)
    # 0.1 + 0.2 - 0.3 is not 0: rewards below 1e-6 count as if they had this size.
    sizes = torch.maximum(largest.abs(), smallest.abs()).clamp(min=ROUNDING)
    return (largest - smallest <= ROUNDING * sizes).all(dim=1)


class EqualGroups:
    """The groups of a generation whose rewards are equal; their completions have the advantage 0.

    Attributes:
        rewards: [rows of all ranks, functions] of the last generation.
    """

    rewards: torch.Tensor

    def read(self, trainer: RolloutTrainer, rewards: torch.Tensor) -> None:
        """Keep the rewards of a generation, [rows of all ranks, functions], as they are compared within groups.

        With `normalize_then_sum` TRL normalises each function's rewards in the group: equal totals are not enough.
        """
        self.rewards = rewards
        weights = trainer.reward_weights[: rewards.size(1)].to(rewards.device)
        is_by_function = trainer.multi_objective_aggregation == "normalize_then_sum"
        self._compared = rewards * weights if is_by_function else total_rewards(rewards, weights)[:, None]
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        self._size = int(size or 1)

    @property
    def are_equal(self) -> torch.Tensor:
        """[groups of all ranks], True where a group's rewards are equal."""
        return equal_groups(self._compared, self._size)

    def apply(self, rollouts: dict[str, Any], metrics: Any, column: Any, accelerator: Any) -> None:
        """Give completions of equal groups the advantage 0, and correct TRL's metric and table.

        Args:
            rollouts: This rank's, of which `advantages` is changed.
            metrics: TRL's lists by name.
            column: The advantages in TRL's table of completions, of all ranks.
            accelerator: The trainer's.
        """
        rows = self.are_equal.repeat_interleave(self._size)
        own = rows.chunk(accelerator.num_processes)[accelerator.process_index]
        rollouts["advantages"] = rollouts["advantages"].masked_fill(own, 0.0)
        for place, is_equal in enumerate(reversed(rows.tolist()[-len(column) :]), start=1):
            if is_equal:
                column[-place] = 0.0
        metrics["frac_reward_zero_std"][-1] = self.are_equal.float().mean().item()

"""Rewards of an evaluation, in which every row counts once.

TRL logs the mean of the batches' means: a last batch of one row weighs as much as the others, and ranks fill it with
rows of the first batch.
"""

from collections import defaultdict

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd

from trl_ext.trainers.generation.groups import total_rewards
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.rows.counted import CountedRows


class EvaluatedRows(CountedRows):
    """The rewards of an evaluation's batches; reward functions call it as their `log_metric`.

    A row is a completion here.
    """

    def __init__(self, num_rows: float):
        super().__init__(num_rows)
        self._rewards: list[torch.Tensor] = []
        self._logged: list[tuple[str, float, int]] = []

    def __call__(self, name: str, value: float, num_rows: int | None = None) -> None:
        """Log a mean over `num_rows` rows; None: over all that count."""
        self._logged.append((name, float(value), self.num_rows if num_rows is None else num_rows))

    def end_batch(self, rewards: torch.Tensor) -> None:
        """Add the rewards of a batch, [rows of all ranks, functions]."""
        self._rewards.append(rewards[: int(min(self.left, len(rewards)))])
        self.left -= len(rewards)

    def metrics(self, trainer: RolloutTrainer) -> dict[str, float]:
        """Return the metrics of rewards, under TRL's names, and those that reward functions logged. Collective."""
        if not self._rewards:
            return {}
        rewards = torch.cat(self._rewards)
        trainer.equal_groups.read(trainer, rewards)
        found = {"frac_reward_zero_std": trainer.equal_groups.are_equal.float().mean().item()}
        totals = total_rewards(rewards, trainer.reward_weights)
        found |= {"reward": totals.nanmean().item(), "reward_std": nanstd(totals).item()}
        for name, column in zip(trainer.reward_func_names, rewards.unbind(dim=1), strict=True):
            found |= {f"rewards/{name}/mean": column.nanmean().item(), f"rewards/{name}/std": nanstd(column).item()}
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for name, value, num_rows in gather_object(self._logged):
            sums[name][0] += value * num_rows
            sums[name][1] += num_rows
        return found | {name: total / num for name, (total, num) in sums.items() if num}

"""The rollouts of a generation become episodes: they are scored, and get PPO's targets once the passes are made.

Legend: B rows of this process, T completion tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trl_ext.errors import RuleError
from trl_ext.rewards import RuleSet
from trl_ext.trainers.generation.parts import RolloutPart, Rows
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.grpo.rewards import GuardedReward, RewardCalls, raise_together
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.inputs import keep_token_ids
from trl_ext.trainers.ppo.objective.equations import moved_to_turns
from trl_ext.trainers.ppo.scores.completion_scores import CompletionScores
from trl_ext.trainers.ppo.targets import HeldOut, PPOTargets, TargetPasses
from trl_ext.trainers.step.rows import Rollouts, counted_tokens


class Episodes(RolloutPart):
    """Adds advantages and returns per token to rollouts.

    Args:
        trainer: The trainer of the actor.
        calls: Its calls of reward functions.
        scores: The scores of completions.
        targets: Make the columns.
        passes: The passes that targets wait for.
        greedy_scores: Returns [B] the score of each row's greedy completion, for ReMax.

    Attributes:
        held_out: Collects the critic's errors in the evaluation that runs; None if none runs.
    """

    held_out: HeldOut | None = None

    def __init__(
        self,
        trainer: GRPOTrainer,
        calls: RewardCalls,
        scores: CompletionScores,
        targets: PPOTargets,
        passes: TargetPasses,
        greedy_scores: Callable[[Rows], torch.Tensor],
    ):
        self._trainer, self._calls, self._scores = trainer, calls, scores
        self._targets, self._passes, self._greedy_scores = targets, passes, greedy_scores
        self._baselines: torch.Tensor | None = None

    def before_generation(self, trainer: RolloutTrainer, rows: Rows) -> Rows:
        """Score greedy completions of the rows for ReMax, in training; return rows with their token ids."""
        is_remax = self._targets.args.advantage_estimator == "remax" and trainer.model.training
        self._baselines = self._greedy_scores(rows) if is_remax else None
        return keep_token_ids(rows)

    def after_generation(self, trainer: RolloutTrainer, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Leave out what nothing scored, and add the targets, after the passes if they precede targets."""
        self._targets.values.critic.after_rollout()
        if trainer.num_generations == 1:
            # With one completion per group it is always 1.
            self._trainer.running_metrics.pop("frac_reward_zero_std", None)
        args, baselines = self._targets.args, self._baselines
        own = self._scores.scores.split(len(rollouts["completion_ids"]))[trainer.accelerator.process_index]
        assert args.steps_per_generation is not None  # set by TRL's config
        num_updates = self._trainer.micro_step // (args.steps_per_generation * self._trainer.num_iterations) + 1
        moved, scores = self.moved_to_turns(rollouts), self._targets.leave_out(rollouts, own, baselines)
        self._passes.add_targets = partial(self._add_targets, scores, num_updates, baselines, moved)
        if not self._passes.precede_targets:
            self._passes.add_targets(rollouts)
        return rollouts

    def moved_to_turns(self, rollouts: Rollouts) -> torch.Tensor | None:
        """Return [B, T] the change of token rewards by rewards per turn; None if this rank has none. Collective."""
        guarded, accelerator = self._calls.guarded, self._trainer.accelerator
        if not any(isinstance(r, GuardedReward) and not isinstance(r.function, RuleSet) for r in guarded):
            return None
        mask, moved = counted_tokens(rollouts), None
        for reward, weight in zip(guarded, self._trainer.reward_weights.tolist(), strict=False):
            if not any(getattr(reward, "turns", ())):
                continue
            try:
                change = moved_to_turns(reward.turns, weight, mask, reward.name)
                moved = change if moved is None else moved + change
            except RuleError as error:
                reward.error = error
        raise_together(guarded, accelerator.process_index)
        return moved

    def _add_targets(
        self,
        scores: torch.Tensor,
        num_updates: int,
        baselines: torch.Tensor | None,
        moved: torch.Tensor | None,
        rollouts: Rollouts,
    ) -> None:
        """Add PPO's targets to rollouts, in training only, and log them. Collective.

        Args:
            scores: [B] of this process's rows.
            num_updates: Updates so far.
            baselines: [B] scores of greedy completions; None but for ReMax.
            moved: [B, T] the change of token rewards by rewards of turns, or None.
            rollouts: The rows, to which columns are added.
        """
        trainer, is_training = self._trainer, self._trainer.model.training
        held_out = None if is_training else self.held_out
        targets = self._targets.complete(
            rollouts, scores, num_updates, baselines, held_out, moved=moved, is_training=is_training
        )
        for name, value in targets.items():
            trainer.running_metrics[name].append(value)
        if is_training:  # a completion's mean in TRL's table of completions, instead of GRPO's group advantage
            lengths = counted_tokens(rollouts).sum(dim=1).clamp(min=1)
            means = trainer.accelerator.gather(rollouts["advantages"].sum(dim=1) / lengths).tolist()
            column = trainer.logged_advantages
            for _ in means:
                column.pop()
            column.extend(means)

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the critic's errors over all batches of the evaluation."""
        return {} if self.held_out is None else self.held_out.metrics()

"""The scores of a generation's completions, from the rewards of rules and from reward models.

Legend: B completions of this rank, N of all ranks, R rules, M reward models.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.grpo.rewards import raise_together, within_bounds
from trl_ext.trainers.ppo.scores.combine import Scoring
from trl_ext.trainers.reward.scorer import CompletionScorer


class CompletionScores(RolloutPart):
    """Asks the reward models, after TRL has called the rules, and combines both.

    Args:
        scoring: Combines the values of rules and reward models.
        models: The reward models, which `scoring` asks.

    Attributes:
        scores: [N] of the rollouts that were scored last, NaN where nothing scored a completion.
    """

    scores: torch.Tensor

    def __init__(self, scoring: Scoring, models: Sequence[CompletionScorer]):
        self._scoring, self._models = scoring, list(models)

    def add_rewards(
        self, trainer: RolloutTrainer, prompts: list[Any], completions: list[Any], rewards: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, R + M] the rewards of the rules [N, R] and the scores of the reward models. Collective.

        Args:
            trainer: The trainer.
            prompts, completions: B of this process.
            rewards: [N, R], NaN where a rule abstains.
        """
        accelerator, weights = trainer.accelerator, trainer.reward_weights.to(trainer.accelerator.device)
        own = rewards.split(len(prompts))[accelerator.process_index]
        with trainer.clock.phase("score"):
            asked = self._scoring.ask_models(prompts, completions, own, weights)
            # accelerate cannot view [n, 0] again after NCCL's gather.
            of_models = accelerator.gather(asked.contiguous()) if asked.size(1) else rewards[:, :0]
        raise_together(self._models, accelerator.process_index)
        per_function = within_bounds(torch.cat([rewards, of_models], dim=1), weights, trainer.reward_func_names)
        trainer.equal_groups.read(trainer, per_function)
        self.scores = self._scoring.scores(per_function, weights, is_training=trainer.model.training)
        return per_function

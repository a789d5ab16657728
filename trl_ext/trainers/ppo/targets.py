"""From scores, log-probabilities and values of rollouts to what the losses aim at.

Legend: B rows, T completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from trl_ext.trainers.grpo.update import counted_tokens
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic.values import CriticValues
from trl_ext.trainers.ppo.equations import (
    AdaptiveKL,
    explained_variance,
    generalized_advantages,
    kl_estimate,
    shaped_rewards,
    whiten,
    wide,
)


@dataclass(frozen=True)
class PPOTargets:
    """Turns TRL's rollouts into PPO's: advantages, returns and old values per token.

    Args:
        args: PPOConfig.
        kl: The coefficient of the KL in the reward; every training batch moves it.
        values: The critic's.
        accelerator: Sums over ranks.
        eos_token_ids: The tokens that end a completion.
    """

    args: PPOConfig
    kl: AdaptiveKL
    values: CriticValues
    accelerator: Accelerator
    eos_token_ids: Sequence[int]

    @torch.no_grad()
    def complete(
        self, rollouts: dict[str, Any], scores: torch.Tensor, num_updates: int, *, is_training: bool
    ) -> dict[str, float]:
        """Add PPO's targets to rollouts; in evaluation, where nothing is trained, only their statistics. Collective.

        Args:
            rollouts: TRL's, of this rank; changed in place.
            scores: [B] NaN where nothing could score.
            num_updates: Batches of rollouts so far, this one included.
            is_training: False in evaluation.

        Returns:
            Metrics over all ranks.
        """
        scores = scores - self._missing_eos_penalty(rollouts)
        # What nothing could score teaches nothing: its tokens are in no loss and in no statistic.
        rollouts["completion_mask"] = rollouts["completion_mask"] * (~scores.isnan())[:, None]
        mask = counted_tokens(rollouts)
        rollouts["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        logps, values = self.values.with_log_probs(rollouts, is_training=is_training)
        if logps is not None:
            rollouts["old_per_token_logps"] = logps
        ref_logps = rollouts.pop("ref_per_token_logps", None)
        kl = torch.zeros_like(mask, dtype=torch.float32)
        if ref_logps is not None and logps is not None:
            kl = torch.where(mask.bool(), kl_estimate(logps, ref_logps, self.args.kl_estimator), 0.0)
        metrics = self._objective(scores, kl, num_updates, is_training=is_training)
        if not is_training:
            return metrics
        assert values is not None, "In training there are values of every rollout."
        metrics |= self._add_targets(rollouts, scores, kl, values, mask)
        # Last: the coefficient that is logged is the one of these rewards.
        if "objective/kl" in metrics:
            self.kl.update(metrics["objective/kl"], int(metrics["episode"]) // num_updates)
        return metrics

    def _missing_eos_penalty(self, rollouts: dict[str, Any]) -> torch.Tensor | float:
        """Return [B], above 0 for completions that were cut off."""
        if self.args.missing_eos_penalty is None:
            return 0.0
        ids = rollouts["completion_ids"]
        is_end = torch.isin(ids, torch.tensor(self.eos_token_ids, device=ids.device))
        has_end = (is_end & rollouts["completion_mask"].bool()).any(dim=1)
        return self.args.missing_eos_penalty * (~has_end).float()

    def _objective(
        self, scores: torch.Tensor, kl: torch.Tensor, num_updates: int, *, is_training: bool
    ) -> dict[str, float]:
        """Return means over the scored completions of all ranks."""
        known = ~scores.isnan()
        sums = torch.stack([known.sum(), scores.nansum(), kl[known].sum(), torch.tensor(len(scores)).to(known.device)])
        num, score, divergence, everything = self._total(wide(sums)).tolist()
        metrics = {"ppo/unscored_frac": 1 - num / everything}
        if num:
            penalty = -self.kl.value * divergence / num
            metrics["objective/scores"] = score / num
            metrics["objective/kl"] = divergence / num
            metrics["objective/non_score_reward"] = penalty
            metrics["objective/rlhf_reward"] = score / num + penalty
        if is_training:
            metrics["ppo/kl_coef"] = self.kl.value
            metrics["episode"] = num_updates * everything
        return metrics

    def _add_targets(
        self,
        rollouts: dict[str, Any],
        scores: torch.Tensor,
        kl: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> dict[str, float]:
        """Add advantages, returns and old values, [B, T] each, to the rollouts; return their statistics."""
        rewards = shaped_rewards(scores, kl, mask, self.kl.value)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, total=self._total)
        advantages, returns = generalized_advantages(rewards, values, mask, self.args.gamma, self.args.lam)
        rollouts |= {
            "advantages": whiten(advantages, mask, total=self._total),
            "returns": returns,
            "values": values,
        }
        return {
            "ppo/explained_variance": explained_variance(values, returns, mask, self._total).item(),
            "ppo/value_mean": self._mean_over_tokens(values, mask),
            "ppo/return_mean": self._mean_over_tokens(returns, mask),
        }

    def _mean_over_tokens(self, x: torch.Tensor, mask: torch.Tensor) -> float:
        total, count = self._total(wide(torch.stack([(x * mask).sum(), mask.sum()]))).tolist()
        return total / max(count, 1)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over ranks. Collective."""
        return self.accelerator.reduce(x, reduction="sum")

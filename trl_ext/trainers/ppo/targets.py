"""PPO's targets: advantages and returns from scores, log-probabilities and values of rollouts, and passes for them.

Legend: B rows, T completion tokens.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator

from trl_ext.rewards.totals.moments import Moments
from trl_ext.trainers.grpo.log_probs import OLD, REFERENCE, UpdatePasses
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic.scale import ValueScale
from trl_ext.trainers.ppo.critic.values import OUTPUTS, CriticValues
from trl_ext.trainers.ppo.objective.equations import (
    LEAST_SPREAD,
    AdaptiveKL,
    Total,
    generalized_advantages,
    kl_estimate,
    less_the_others,
    moments,
    rewards_to_come,
    shaped_rewards,
    spread_over_tokens,
    standardised,
    whiten,
    wide,
)
from trl_ext.trainers.step.rows import Rollouts, counted_tokens

# A row's place in its generation: TRL shuffles rows before the passes, and targets compare neighbours.
_PLACE = "place_in_generation"
_READ = ("completion_ids", "completion_mask", "tool_mask", OLD, REFERENCE, OUTPUTS)


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """Moments of the returns, and of the returns less the values; several batches can be merged."""

    returns: Moments
    errors: Moments

    @classmethod
    def of(cls, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total: Total) -> "ValueErrors":
        """Measure a batch of values and returns, [B, T] each, over the counted tokens of all ranks. Collective.

        Args:
            values, returns: [B, T].
            mask: [B, T] 1 for counted tokens.
            total: Sums a tensor over ranks; called twice.
        """
        pair = torch.stack([wide(returns), wide(returns) - wide(values)])
        count, means, squares = moments(pair, wide(mask).bool(), total)
        pairs = zip(means.nan_to_num().tolist(), squares.tolist(), strict=True)
        return cls(*(Moments(count.item(), mean, square) for mean, square in pairs))

    def merged(self, other: "ValueErrors") -> "ValueErrors":
        """Return the moments of both together."""
        return ValueErrors(self.returns.merged(other.returns), self.errors.merged(other.errors))

    def metrics(self) -> dict[str, float]:
        """Return the explained variance: 1 - Var(return - value) / Var(return).

        It is 1 for a perfect critic, 0 for a constant or if returns do not vary, and below 0 for a worse critic.
        """
        returns = self.returns
        varies = returns.squares > returns.count * (LEAST_SPREAD * returns.mean) ** 2
        return {"ppo/explained_variance": 1 - self.errors.squares / returns.squares if varies else 0.0}

    def mean_square(self) -> float:
        """Return the mean squared error over all tokens; 0 without a token."""
        errors = self.errors
        return errors.squares / errors.count + errors.mean**2 if errors.count else 0.0


class TargetPasses(UpdatePasses):
    """Makes the passes that targets need by the update's own forwards, the critic's included."""

    add_targets: Callable[[Rollouts], None]  # to rollouts; called after the passes that precede targets

    def __init__(self, *of_passes: Any, values: CriticValues):
        super().__init__(*of_passes)
        self._values = values

    def take(self, rollouts: Rollouts) -> None:
        super().take(rollouts)
        critic, beta = self._values.critic, self._trainer.beta
        self.precede_targets = self._is_waiting and bool(beta or critic.has_values)
        if not self.precede_targets:
            return
        rollouts[_PLACE] = torch.arange(len(rollouts["completion_ids"]), device=self._trainer.accelerator.device)
        if OLD not in self._due and (beta or critic.comes_with_log_probs):
            self._due.append(OLD)
        if critic.has_values and not critic.comes_with_log_probs:
            self._due.append(OUTPUTS)

    def make(self, micro_batches: Sequence[Rollouts]) -> None:
        # With a new list the update reads the rows again, and with them their targets.
        super().make(list(micro_batches) if self.precede_targets else micro_batches)
        if not self.precede_targets:
            return
        self._values.forget()
        self._values.critic.after_rollout()
        places = [micro_batch.pop(_PLACE) for micro_batch in micro_batches]
        order, names = torch.cat(places).argsort(), [name for name in _READ if name in micro_batches[0]]
        rollouts: dict[str, torch.Tensor] = {}
        for name in names:
            rollouts[name] = torch.cat([one[name] for one in micro_batches])[order]
        self.add_targets(rollouts)
        for micro_batch, place in zip(micro_batches, places, strict=True):
            for name in names:
                del micro_batch[name]
            micro_batch.update({name: column[place] for name, column in rollouts.items()})
        self.precede_targets = False

    def _columns(self, name: str, model: Any, batch: Rollouts) -> Rollouts:
        self._values.forget()
        columns = {} if name == OUTPUTS else super()._columns(name, model, batch)
        if name == OUTPUTS or (name == OLD and self._values.critic.comes_with_log_probs):
            columns[OUTPUTS] = self._values.in_loss(model, batch)
        return columns


class HeldOut:
    """The critic's errors in an evaluation while it runs; it uses a copy of the critic's scale in training."""

    def __init__(self, scale: ValueScale):
        self.scale = copy.copy(scale)
        self._errors: ValueErrors | None = None

    def add(self, errors: ValueErrors) -> None:
        """Add a batch's errors of the critic."""
        self._errors = errors if self._errors is None else self._errors.merged(errors)

    def metrics(self) -> dict[str, float]:
        """Return the critic's metrics over all batches; none without a batch."""
        if self._errors is None:
            return {}
        return self._errors.metrics() | {"loss/value_avg": 0.5 * self._errors.mean_square() / self.scale.std**2}


@dataclass(frozen=True)
class PPOTargets:
    """Adds advantages, returns and old values per token to TRL's rollouts; training updates kl and scale."""

    args: PPOConfig
    kl: AdaptiveKL
    values: CriticValues
    scale: ValueScale
    accelerator: Accelerator
    eos_token_ids: Sequence[int]

    def leave_out(self, rollouts: Rollouts, scores: torch.Tensor, baselines: torch.Tensor | None) -> torch.Tensor:
        """Leave completions without a score out of the masks; return the scores [B] with penalties. Collective."""
        scores = scores - self.missing_eos_penalty(rollouts)
        if baselines is not None:  # without a baseline a completion counts as unscored
            scores = scores.masked_fill(baselines.isnan(), torch.nan)
        # Tokens of unscored completions count in no loss and in no statistic.
        rollouts["completion_mask"] = rollouts["completion_mask"] * (~scores.isnan())[:, None]
        rollouts["num_items_in_batch"] = self.accelerator.gather(counted_tokens(rollouts).sum()).sum()
        return scores

    @torch.no_grad()
    def complete(
        self,
        rollouts: dict[str, Any],
        scores: torch.Tensor,
        num_updates: int,
        baselines: torch.Tensor | None = None,
        held_out: HeldOut | None = None,
        *,
        moved: torch.Tensor | None = None,
        is_training: bool,
    ) -> dict[str, float]:
        """Add PPO's targets to rollouts, in training only; return metrics over all ranks. Collective.

        Args:
            rollouts: TRL's, of this rank; changed in place.
            scores: [B] from `leave_out`, NaN for completions that are not scored.
            num_updates: Number of batches of rollouts, this batch included.
            baselines: [B] for ReMax: the score of each prompt's greedy completion.
            held_out: Collects the critic's errors in an evaluation.
            moved: [B, T] result of `moved_to_turns`.
        """
        mask = counted_tokens(rollouts)
        logps, values = self.values.with_log_probs(rollouts)
        if logps is not None:
            rollouts["old_per_token_logps"] = logps
        ref_logps = rollouts.get("ref_per_token_logps")
        in_reward = self.args.kl_term == "reward"
        if in_reward or not is_training:
            rollouts.pop("ref_per_token_logps", None)
        kl = torch.zeros_like(mask, dtype=torch.float32)
        if ref_logps is not None and logps is not None:
            kl = torch.where(mask.bool(), kl_estimate(logps, ref_logps, self.args.kl_estimator), 0.0)
        metrics = self._objective(scores, kl, num_updates, is_training=is_training)
        if not is_training and (held_out is None or values is None):
            return metrics
        rewards = shaped_rewards(scores, kl, mask, self.kl.value if in_reward else 0.0)
        if moved is not None:
            rewards = rewards + moved * mask
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, total=self._total)
        if self.args.advantage_estimator == "gae":
            assert values is not None, "In training there are values of every rollout."
            metrics |= self._add_targets(rollouts, rewards, values, mask, held_out)
        else:
            rollouts["advantages"] = self._without_critic(rewards, scores.isnan(), mask, baselines)
        # Last, because the logged coefficient is the coefficient of these rewards.
        if is_training and "objective/kl" in metrics:
            self.kl.update(metrics["objective/kl"], int(metrics["episode"]) // num_updates)
        return metrics

    def missing_eos_penalty(self, rollouts: dict[str, Any]) -> torch.Tensor | float:
        """Return [B] penalties, above 0 for completions that were cut off."""
        if self.args.missing_eos_penalty is None:
            return 0.0
        ids = rollouts["completion_ids"]
        is_end = torch.isin(ids, torch.tensor(self.eos_token_ids, device=ids.device))
        mask = rollouts["completion_mask"].bool()
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # earlier turns have ends, too
        has_end = (is_end & is_last).any(dim=1)
        return self.args.missing_eos_penalty * (~has_end).float()

    def _objective(
        self, scores: torch.Tensor, kl: torch.Tensor, num_updates: int, *, is_training: bool
    ) -> dict[str, float]:
        """Return means over the scored completions of all ranks.

        Args:
            scores: [B] NaN where nothing was scored.
            kl: [B, T] the KL to the reference, 0 for tokens that do not count.
            num_updates: Updates so far: each has as many episodes.
            is_training: False in an evaluation, which logs neither coefficient nor episodes.
        """
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
        rewards: torch.Tensor,
        outputs: torch.Tensor,
        mask: torch.Tensor,
        held_out: HeldOut | None,
    ) -> dict[str, float]:
        """Add advantages, returns and old values, [B, T] each, to the rollouts; return their statistics.

        In training the batch updates the critic's scale before use; in evaluation only if the scale is not set yet.

        Args:
            rollouts: The rows, to which columns are added.
            rewards: [B, T] a reward for each token.
            outputs: [B, T] of the critic, before its scale.
            mask: [B, T] 1 for counted tokens.
            held_out: Collects the critic's errors in an evaluation; None in training.
        """
        scale = self.scale if held_out is None else held_out.scale
        if held_out is None or not scale.has_begun:
            to_come = rewards_to_come(rewards, mask, self.args.gamma)
            if self.args.critic_init is not None and self.args.value_normalisation:
                scale.centre(outputs, to_come, mask, self._total)
            scale.follow(to_come, mask, self._total)
        values = scale.values(scale.standardised(outputs))
        advantages, returns = generalized_advantages(rewards, values, mask, self.args.gamma, self.args.lam)
        errors = ValueErrors.of(values, returns, mask, self._total)
        metrics = {
            "ppo/value_mean": self._mean_over_tokens(values, mask),
            "ppo/return_mean": self._mean_over_tokens(returns, mask),
        }
        if held_out is not None:
            held_out.add(errors)
            return metrics
        rollouts |= {
            "advantages": whiten(advantages, mask, total=self._total),
            "returns": returns,
            "values": values,
        }
        return metrics | errors.metrics() | scale.metrics()

    def _without_critic(
        self, rewards: torch.Tensor, unscored: torch.Tensor, mask: torch.Tensor, baselines: torch.Tensor | None
    ) -> torch.Tensor:
        """Return advantages [B, T] with a baseline that is not a critic.

        Args:
            rewards: [B, T] a reward for each token.
            unscored: [B] True for rows without a score.
            mask: [B, T] 1 for counted tokens.
            baselines: [B] scores of greedy completions for ReMax; None for other estimators.
        """
        estimator = self.args.advantage_estimator
        if estimator == "reinforce_pp":
            return whiten(rewards_to_come(rewards, mask, self.args.gamma), mask, total=self._total)
        if estimator == "remax":
            assert baselines is not None, "ReMax's baselines come with the rollouts."
            return torch.where(mask.bool(), rewards_to_come(rewards, mask) - baselines[:, None], 0.0)
        # A group may be on several ranks.
        totals = self.accelerator.gather(wide(rewards).sum(dim=1).masked_fill(unscored, torch.nan))
        compare = less_the_others if estimator == "rloo" else standardised
        advantages = compare(totals, cast(int, self.args.num_generations))
        own = advantages.split(len(rewards))[self.accelerator.process_index]
        return spread_over_tokens(own, mask).to(rewards.dtype)

    def _mean_over_tokens(self, x: torch.Tensor, mask: torch.Tensor) -> float:
        total, count = self._total(wide(torch.stack([(x * mask).sum(), mask.sum()]))).tolist()
        return total / max(count, 1)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over ranks. Collective."""
        return self.accelerator.reduce(x, reduction="sum")

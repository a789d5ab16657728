"""From rollouts to targets: values, rewards with the KL in them, advantages and returns per token.

Legend: B rows, P prompt tokens, T completion tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from trl_ext.trainers.forward.completions import score_values
from trl_ext.trainers.forward.roles import CRITIC
from trl_ext.trainers.forward.value_head import outputs_of
from trl_ext.trainers.grpo.rewards import raise_together
from trl_ext.trainers.ppo.equations import (
    explained_variance,
    generalized_advantages,
    shaped_rewards,
    whiten,
)
from trl_ext.trainers.ppo.inputs import TokenizedPrompt, keep_token_ids
from trl_ext.trainers.ppo.kl import kl_estimate


class Rollouts:
    """Mixed into PPOTrainer, before GRPOTrainer: what happens between generation and the loss."""

    # Values -------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        """Overrides trl_ext.GRPOTrainer's: rows of a forward without gradient; keeps what a value head says."""
        if batch_size and self.args.local_rollout_forward_batch_size and not torch.is_grad_enabled():
            batch_size = self.args.local_rollout_forward_batch_size
        padded_head = self._critic.comes_with_log_probs and not self._packs
        with outputs_of(model) if padded_head else nullcontext([]) as outputs:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options
            )
        values = [o.token_values[:, -logits_to_keep - 1 : -1] for o in outputs if o.get("token_values") is not None]
        if values:
            self._seen_values.append(torch.cat(values))
        return result

    def _packed_batch(self, *args):
        """Overrides trl_ext.GRPOTrainer._packed_batch: keeps what a value head says."""
        result = super()._packed_batch(*args)
        if result.values is not None:
            self._seen_values.append(result.values)
        return result

    def _values(self, actor, input_ids, attention_mask, width, batch_size=None) -> torch.Tensor:
        """[B, T] what the critic expects before each completion token, by forwards of its own."""
        model = self._critic.model(actor)
        if not torch.is_grad_enabled():
            batch_size = self.args.local_rollout_forward_batch_size or batch_size
        with self._clock.phase("update" if torch.is_grad_enabled() else "logps"):
            parts = self._parts(input_ids, attention_mask, batch_size)
            return torch.cat([self._part_values(model, ids, mask, width) for ids, mask in parts])

    def _part_values(self, model, input_ids, attention_mask, width) -> torch.Tensor:
        if not self._packs:
            self._count(input_ids.numel(), attention_mask, input_ids)
            with self.accelerator.autocast():
                outputs = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, role=CRITIC)
            return outputs.token_values[:, -width - 1 : -1]
        batch, rows, num_forwards = self._planned(input_ids, attention_mask, width, self._share_prompt)
        with self.accelerator.autocast():
            values, num = score_values(model, batch, rows, input_ids.device, num_forwards, role=CRITIC)
        self._count(num, attention_mask, input_ids)
        return values

    # Rollouts -----------------------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts):
        """Overrides trl.GRPOTrainer._tokenize_prompts: a tokenized dataset's tokens stay what they are."""
        if isinstance(prompts[0], TokenizedPrompt):
            return [prompt.ids for prompt in prompts], None, {}
        return super()._tokenize_prompts(prompts)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Overrides trl_ext.GRPOTrainer._calculate_rewards: rules, then the reward models."""
        size, device = len(prompts), self.accelerator.device
        weights = self.reward_weights.to(device)
        rules = torch.zeros(size * self.accelerator.num_processes, 0, device=device)
        if self._rules:
            with self._only_rules():
                rules = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        own = rules[self._own_rows(size)]
        with self._clock.phase("score"):
            models = self.accelerator.gather(self._scoring.ask_models(prompts, completions, own, weights).contiguous())
        raise_together(self._reward_models, self.accelerator.num_processes, self.accelerator.process_index)
        per_function = torch.cat([rules, models], dim=1)
        self._scores = self._scoring.scores(per_function, weights, self.model.training)
        return per_function

    @contextmanager
    def _only_rules(self) -> Iterator[None]:
        """Inside the block TRL sees the rules and not the reward models."""
        names = ("reward_funcs", "reward_func_names", "reward_processing_classes")
        everything = {name: getattr(self, name) for name in names}
        for name, values in everything.items():
            setattr(self, name, values[: len(self._rules)])
        try:
            yield
        finally:
            for name, values in everything.items():
                setattr(self, name, values)

    def _own_rows(self, size: int) -> slice:
        rank = self.accelerator.process_index
        return slice(rank * size, (rank + 1) * size)

    def _generate_and_score_completions(self, inputs):
        """Overrides trl_ext.GRPOTrainer._generate_and_score_completions: advantages and returns per token."""
        self._seen_values.clear()
        output = super()._generate_and_score_completions(keep_token_ids(inputs))
        self._critic.after_rollout()
        mode = "train" if self.model.training else "eval"
        if self.num_generations == 1:
            # Of groups of one: always 1, and no news.
            self._metrics[mode].pop("frac_reward_zero_std", None)
        return self._with_advantages(output, mode)

    @torch.no_grad()
    def _with_advantages(self, output: dict[str, Any], mode: str) -> dict[str, Any]:
        """TRL's rollouts with PPO's targets; in evaluation, where nothing is trained, their statistics only."""
        scores = self._scores[self._own_rows(len(output["completion_ids"]))] - self._missing_eos_penalty(output)
        # What nothing could score teaches nothing: its tokens are in no loss and in no statistic.
        output["completion_mask"] = output["completion_mask"] * (~scores.isnan())[:, None]
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        output["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        logps, values = self._policy_and_values(output, mode)
        if logps is not None:
            output["old_per_token_logps"] = logps
        ref_logps = output.pop("ref_per_token_logps", None)
        kl = torch.zeros_like(mask, dtype=torch.float32)
        if ref_logps is not None:
            kl = torch.where(mask.bool(), kl_estimate(logps, ref_logps, self.args.kl_estimator), 0.0)
        self._note_objective(mode, scores, kl)
        if mode == "train":
            self._add_targets(output, scores, kl, values, mask)
        return output

    def _missing_eos_penalty(self, output: dict[str, Any]) -> torch.Tensor | float:
        """[B] for completions that were cut off."""
        if self.args.missing_eos_penalty is None:
            return 0.0
        ids = output["completion_ids"]
        ends = torch.isin(ids, torch.tensor(self.eos_token_ids, device=ids.device)) & output["completion_mask"].bool()
        return self.args.missing_eos_penalty * (~ends.any(dim=1)).float()

    def _policy_and_values(self, output: dict[str, Any], mode: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[B, T] log-probabilities under the policy that sampled, and the critic's values; None where not needed."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        width = output["completion_ids"].size(1)
        is_training = mode == "train"
        rows = self.args.per_device_train_batch_size if is_training else self.args.per_device_eval_batch_size
        values = self._seen_values[0] if self._seen_values and "old_per_token_logps" in output else None
        logps = output.get("old_per_token_logps")
        with_head = is_training and self._critic.comes_with_log_probs and values is None
        if with_head or (logps is None and self.beta):
            self._seen_values.clear()
            logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, batch_size=rows)
            values = self._seen_values[0] if self._seen_values else None
        if is_training and not self._critic.comes_with_log_probs:
            values = self._values(self.model, ids, mask, width, batch_size=rows)
        return logps, values

    def _add_targets(self, output, scores, kl, values, mask) -> None:
        """Advantages, returns and old values, [B, T] each, and what is worth knowing about them."""
        rewards = shaped_rewards(scores, kl, mask, self._kl.value)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, total=self._total)
        advantages, returns = generalized_advantages(rewards, values, mask, self.args.gamma, self.args.lam)
        output["advantages"] = whiten(advantages, mask, total=self._total)
        output["returns"], output["values"] = returns, values
        self._note_advantages(output["advantages"], mask)
        metrics = self._metrics["train"]
        metrics["ppo/explained_variance"].append(explained_variance(values, returns, mask, self._total).item())
        metrics["ppo/value_mean"].append(self._mean_over_tokens(values, mask))
        metrics["ppo/return_mean"].append(self._mean_over_tokens(returns, mask))

    def _note_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """In TRL's table of completions: a completion's mean advantage, instead of GRPO's within groups of one."""
        means = self.accelerator.gather(advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        column = self._logs["advantages"]
        for _ in means:
            column.pop()
        column.extend(means)

    def _note_objective(self, mode: str, scores: torch.Tensor, kl: torch.Tensor) -> None:
        """Means over the scored completions of all ranks; steers the KL coefficient."""
        known = ~scores.isnan()
        sums = torch.stack([known.sum(), scores.nansum(), kl[known].sum(), torch.tensor(len(scores)).to(known.device)])
        num, score, divergence, everything = self._total(sums.double()).tolist()
        metrics = self._metrics[mode]
        metrics["ppo/unscored_frac"].append(1 - num / everything)
        if num:
            penalty = -self._kl.value * divergence / num
            metrics["objective/scores"].append(score / num)
            metrics["objective/kl"].append(divergence / num)
            metrics["objective/non_score_reward"].append(penalty)
            metrics["objective/rlhf_reward"].append(score / num + penalty)
        if mode == "train":
            metrics["ppo/kl_coef"].append(self._kl.value)
            metrics["episode"].append(self._episodes_after(everything))
            if num:
                self._kl.update(divergence / num, int(everything))

    def _episodes_after(self, num_episodes: float) -> float:
        steps = self.args.steps_per_generation * self.num_iterations
        return (self._step // steps + 1) * num_episodes

    def _mean_over_tokens(self, x: torch.Tensor, mask: torch.Tensor) -> float:
        total, count = self._total(torch.stack([(x * mask).sum(), mask.sum()]).double()).tolist()
        return total / max(count, 1)

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Summed over ranks. Collective."""
        return self.accelerator.reduce(x, reduction="sum")

"""`trl_ext.PPOTrainer`: the PPO that TRL removed in 1.13, alive on GRPOTrainer's engine.

GRPO generates, scores and computes the clipped policy loss. PPO adds a critic, the KL in the reward, generalized
advantages and a value loss. The trainer holds its models, the critic and its values, the scoring and the targets; what
stands here are the hooks that TRL calls. Legend: B rows, T completion tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_ext.compat.peft import base_model
from trl_ext.compat.swap import swapped
from trl_ext.compat.trl import print_samples
from trl_ext.errors import ConfigError
from trl_ext.packing.check import CheckResult
from trl_ext.trainers.forward.completions import LogProbs
from trl_ext.trainers.forward.value_head import hidden_from_names, hide_heads_from_vllm
from trl_ext.trainers.grpo.rewards import raise_together
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.grpo.update import counted_tokens
from trl_ext.trainers.memory.oom.rescue import Forward
from trl_ext.trainers.memory.plan import settle_memory
from trl_ext.trainers.memory.rehearsal.inputs import MicroBatch, with_targets
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.critic.critics import Critic, CriticStarts, SeparateCritic, split_group
from trl_ext.trainers.ppo.critic.values import CriticValues
from trl_ext.trainers.ppo.equations import AdaptiveKL, clipped_value_loss
from trl_ext.trainers.ppo.inputs import (
    TokenizedPrompt,
    check_arguments,
    check_models,
    keep_token_ids,
    listed,
    with_prompts,
)
from trl_ext.trainers.ppo.models import GivenModels, PPOModels
from trl_ext.trainers.ppo.targets import PPOTargets


class PPOTrainer(GRPOTrainer):
    """PPO with the arguments of TRL 1.12's PPOTrainer, in their order, and GRPOTrainer's by name.

    Args:
        args: PPOConfig.
        processing_class: Tokenizer.
        model: The actor: model or path.
        ref_model: Reference of the KL. None: the actor's adapters switched off, or a copy of the actor.
        reward_model: One or several sequence classification models with one label, or their paths. Each reads text
            through its own tokenizer.
        train_dataset: With a column `prompt`, text or messages; or tokenized, with `input_ids`.
        value_model: For critic="separate": sequence classification model or path with one label.
        data_collator: TRL 1.12's; not used.
        eval_dataset, optimizers, callbacks, peft_config: As in TRL.
        reward_funcs: A RuleSet or other reward functions, beside reward models or instead of them. `reward_weights`
            names theirs first, then those of the reward models.
        reward_processing_classes: Tokenizers of the reward models, where they are not beside their weights.
        reward_adapter: Folder of a LoRA reward model of the actor's backbone; it becomes a third adapter.
        quantization_config, tools, rollout_func, environment_factory: As in TRL's GRPOTrainer.

    Metrics, beside GRPOTrainer's:
        objective/scores, objective/kl, objective/non_score_reward, objective/rlhf_reward: Means over completions.
        loss/policy_avg, loss/value_avg, val/clipfrac_avg: Of the optimizer steps.
        ppo/kl_coef, ppo/explained_variance, ppo/value_mean, ppo/return_mean, ppo/unscored_frac: Of the episodes.
        episode: Episodes sampled so far.

    Raises:
        ConfigError: for models, settings and checkpoints that cannot work together, before the first step.
    """

    _tag_names: ClassVar = ["trl", "ppo"]  # type: ignore[misc]  # TRL names no ClassVar
    _name = "PPO"
    memory_kind = "ppo"
    _paper: ClassVar = {  # type: ignore[misc]  # as above
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": "@article{schulman2017proximal,\n    title  = {{Proximal Policy Optimization Algorithms}},\n"
        "    author = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},\n"
        "    year   = 2017,\n    eprint = {arXiv:1707.06347}\n}",
    }

    args: PPOConfig
    model: PreTrainedModel | PeftModel
    _critic: Critic
    _values: CriticValues
    _targets: PPOTargets
    _scores: torch.Tensor  # [B of all ranks] of the rollouts that were scored last
    _forwards: Sequence[Forward] = ()  # of the micro-step

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Any = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        reward_adapter: str | None = None,
        **grpo_options: Any,
    ):
        rules, models = listed(reward_funcs), listed(reward_model)
        check_arguments(args, data_collator)
        check_models(args, model, ref_model, value_model, [*models, *listed(reward_adapter)], rules)
        grpo_options |= {"peft_config": peft_config, "callbacks": callbacks, "optimizers": optimizers}
        inputs: dict[str, Any] = {"tokenizer": processing_class, "dataset": train_dataset}
        inputs["reward_model"] = "adapter" if reward_adapter else "copy" if models else "none"
        settle_memory("ppo", args, grpo_options, model, has_value_model=value_model is not None, **inputs)
        scorers = (models, reward_processing_classes, reward_adapter)
        given = GivenModels(model, ref_model, value_model, *scorers, processing_class, grpo_options["peft_config"])
        self._ppo_models = PPOModels(self, args, given)
        self._scoring = self._ppo_models.scoring(len(rules))
        self._kl = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        self._ppo_models.choose_reference()
        functions, tokenizer = [*rules, *self._ppo_models.rewards], self._ppo_models.tokenizer
        roles = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        datasets = [with_prompts(dataset, tokenizer, role) for role, dataset in roles.items()]
        # TRL would load a reference again by the model's name, which may not be what the model is now.
        with swapped(args, beta=args.beta if isinstance(model, str) and ref_model is None else 0.0):
            super().__init__(model, functions, args, *datasets, tokenizer, **grpo_options)
        self.given_rewards = [*rules, *models, *listed(reward_adapter)]

    def _add_models(self) -> None:
        """Overrides trl_ext.GRPOTrainer._add_models: reference, critic and reward models join the actor."""
        self.beta = self._kl.value
        self.ref_model = self._ppo_models.prepare_reference()
        self._critic = self._ppo_models.make_critic()
        self._ppo_models.prepare_rewards()
        if isinstance(self._critic, SeparateCritic):
            self.add_callback(CriticStarts(self._critic))
        self._set_stop_tokens()
        if self.use_vllm:
            hide_heads_from_vllm(self.vllm_generation, base_model(self.model))
        self._values = CriticValues(self, self._critic, self.args.local_rollout_forward_batch_size)
        self._targets = PPOTargets(self.args, self._kl, self._values, self.accelerator, self.eos_token_ids)

    def _set_stop_tokens(self) -> None:
        """Take TRL 1.12's `stop_token` and `stop_token_id`, where given, instead of the model's EOS tokens."""
        if self.args.stop_token is None and self.args.stop_token_id is None:
            return
        given = self.args.stop_token_id
        num_tokens = base_model(self.model).config.get_text_config().vocab_size
        if given is not None and given >= num_tokens:
            raise ConfigError(f"stop_token_id={given} would end no completion: the model has {num_tokens} tokens.")
        self.eos_token_ids = [self._tokenizer.eos_token_id if given is None else given]
        if self.use_vllm:
            options = self.vllm_generation.generation_kwargs or {}
            self.vllm_generation.generation_kwargs = options | {"stop_token_ids": self.eos_token_ids}
        else:
            self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            self.generation_config.eos_token_id = self.eos_token_ids

    def _why_zero_advantage_counts(self) -> str:
        """Overrides trl_ext.GRPOTrainer._why_zero_advantage_counts: the critic learns from all."""
        return "the critic learns from every row"

    @property
    def _num_passes_of_update(self) -> int:  # type: ignore[override]  # a constant of GRPO's
        """Overrides trl_ext.GRPOTrainer._num_passes_of_update: one for a critic with forwards of its own."""
        return 1 if self._critic.comes_with_log_probs else 2

    # Packing ------------------------------------------------------------------------------------------------------

    def _models(self) -> list[Any]:
        """Overrides trl_ext.GRPOTrainer._models: a separate critic forwards flat rows, too."""
        value_model = self._ppo_models.value_model
        return super()._models() + ([] if value_model is None else [value_model])

    def _self_check(self, model: Any) -> CheckResult:
        """Overrides trl_ext.GRPOTrainer._self_check: a separate critic must be exact, too."""
        result = super()._self_check(model)
        if not isinstance(self._critic, SeparateCritic) or not result.is_exact:
            return result
        return self._critic.check_packing()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Overrides trl_ext.GRPOTrainer._get_per_token_logps_and_entropies: rows of a forward without gradient; notes
        what a value head says."""
        if batch_size and self.args.local_rollout_forward_batch_size and not torch.is_grad_enabled():
            batch_size = self.args.local_rollout_forward_batch_size
        with self._values.noted_from(model, logits_to_keep):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **options
            )

    def _packed_batch(self, *args: Any) -> LogProbs:
        """Overrides trl_ext.GRPOTrainer._packed_batch: notes what a value head says."""
        result = super()._packed_batch(*args)
        self._values.note(result.values)
        return result

    # Rollouts -----------------------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """Overrides trl.GRPOTrainer._tokenize_prompts: a tokenized dataset's tokens stay what they are."""
        if isinstance(prompts[0], TokenizedPrompt):
            return [prompt.ids for prompt in prompts], None, {}
        return super()._tokenize_prompts(prompts)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Overrides trl_ext.GRPOTrainer._calculate_rewards: rules, then the reward models."""
        accelerator, weights = self.accelerator, self.reward_weights.to(self.accelerator.device)
        rules = torch.zeros(len(prompts) * accelerator.num_processes, 0, device=accelerator.device)
        if self._scoring.num_rules:
            names = ("reward_funcs", "reward_func_names", "reward_processing_classes")
            with swapped(self, **{name: getattr(self, name)[: self._scoring.num_rules] for name in names}):
                rules = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        own = rules.split(len(prompts))[accelerator.process_index]
        with self._clock.phase("score"):
            asked = self._scoring.ask_models(prompts, completions, completion_ids_list, own, weights)
            models = accelerator.gather(asked.contiguous())
        raise_together(self._ppo_models.rewards, accelerator.num_processes, accelerator.process_index)
        per_function = torch.cat([rules, models], dim=1)
        self._scores = self._scoring.scores(per_function, weights, is_training=self.model.training)
        return per_function

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Overrides trl_ext.GRPOTrainer._generate_and_score_completions: advantages and returns per token."""
        self._values.forget()
        output = super()._generate_and_score_completions(keep_token_ids(inputs))
        self._critic.after_rollout()
        is_training = self.model.training
        metrics = self._metrics["train" if is_training else "eval"]
        if self.num_generations == 1:
            # Of groups of one: always 1, and no news.
            metrics.pop("frac_reward_zero_std", None)
        own = self._scores.split(len(output["completion_ids"]))[self.accelerator.process_index]
        num_updates = self._step // (cast(int, self.args.steps_per_generation) * self.num_iterations) + 1
        for name, value in self._targets.complete(output, own, num_updates, is_training=is_training).items():
            metrics[name].append(value)
        if is_training:
            self._show_advantages(output)
        return output

    def _show_advantages(self, rollouts: dict[str, Any]) -> None:
        """Show a completion's mean advantage in TRL's table of completions, instead of GRPO's within groups of one."""
        lengths = counted_tokens(rollouts).sum(dim=1).clamp(min=1)
        means = self.accelerator.gather(rollouts["advantages"].sum(dim=1) / lengths).tolist()
        column: Any = self._logs["advantages"]
        for _ in means:
            column.pop()
        column.extend(means)

    def generate_completions(self, sampling: bool = False) -> None:
        """Print completions of the evaluation set with their scores, as TRL 1.12 did.

        Args:
            sampling: Only the first batch.
        """
        if self.eval_dataset is None:
            return
        self.model.eval()
        for batch in self.get_eval_dataloader():
            self._generate_and_score_completions(batch)
            if self.accelerator.is_main_process:
                print_samples(self._logs, self._scores.numel(), self.state.global_step)
            if sampling:
                break

    # Training -----------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Overrides transformers.Trainer.create_optimizer: the critic at its own learning rate."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.args.value_learning_rate is not None and self._critic.is_trained_with_actor:
            split_group(optimizer, self._critic.parameters(), self.args.value_learning_rate)
        return optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Overrides trl_ext.GRPOTrainer.compute_loss: keeps the forwards for a separate critic."""
        if self._rescue.serving is None:
            self._forwards = [self._update.as_one(inputs)] if isinstance(inputs, dict) else inputs
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Overrides trl_ext.GRPOTrainer._compute_loss: without KL, which is in the reward; with the value loss."""
        self._values.forget()
        with swapped(self, beta=0.0):
            loss = super()._compute_loss(model, inputs)
        if "returns" not in inputs:  # evaluation
            return loss
        self._note("loss/policy_avg", loss.detach())
        if not self._critic.is_trained_with_actor:
            return loss
        return loss + self._value_loss(self._values.in_loss(model, inputs), inputs)

    def _value_loss(self, values: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the weighted value loss; over micro-batches and ranks of a step it adds up to a mean over tokens."""
        mask = counted_tokens(inputs)
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        num_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes * share
        result = clipped_value_loss(
            values, inputs["values"], inputs["returns"], mask, self.args.cliprange_value, num_tokens
        )
        num_counted = mask.sum()
        self._note("loss/value_avg", result.loss.detach())
        self._note("val/clipfrac_avg", result.num_clipped / num_counted.clamp(min=1), weight=num_counted)
        return self.args.vf_coef * result.loss

    def _train_others(self, model: Any, loss: torch.Tensor) -> torch.Tensor:
        """Overrides trl_ext.GRPOTrainer._train_others: a separate critic goes backward when the actor has."""
        if isinstance(self._critic, SeparateCritic):
            loss = loss + self._train_critic(self._critic, model, self._forwards)
        self._forwards = ()
        return loss

    def _train_critic(self, critic: SeparateCritic, actor: Any, forwards: Sequence[Forward]) -> torch.Tensor:
        """Forward and backward of a separate critic; return its value loss."""
        return critic.train_on(
            forwards, self._rescue, lambda batch: self._value_loss(self._values.forwarded(actor, batch), batch)
        )

    # Rehearsal ----------------------------------------------------------------------------------------------------

    def _largest_micro_batch(self) -> MicroBatch:
        """Overrides trl_ext.GRPOTrainer._largest_micro_batch: with PPO's targets."""
        return with_targets(super()._largest_micro_batch())

    def _rehearse(self, batch: MicroBatch) -> None:
        """Overrides trl_ext.GRPOTrainer._rehearse: a separate critic goes backward when the actor has."""
        self._critic.after_rollout()
        super()._rehearse(batch)
        if isinstance(self._critic, SeparateCritic):
            self._train_critic(self._critic, self.model_wrapped, [self._update.as_one(batch.inputs)])
        self._values.forget()

    # Saving and resuming ------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Overrides transformers.Trainer._save: the actor as plain transformers or PEFT, the critic beside it."""
        output_dir = output_dir or str(self.args.output_dir)
        critic = self._critic.gathered(state_dict)
        with hidden_from_names(base_model(self.model)):
            super()._save(output_dir, state_dict and critic_files.without_value_head(state_dict))
        if self.args.should_save:
            critic_files.write_kind(output_dir, self._critic.name)
            self._critic.save(output_dir, critic)

    def _save_own_state(self, folder: str) -> None:
        """Overrides trl_ext.GRPOTrainer._save_own_state: the critic's optimizer and the running statistics."""
        super()._save_own_state(folder)
        self._critic.save_training_state(folder)
        if self.args.should_save:
            state = {"kl": self._kl.state_dict(), "scores": self._scoring.state_dict()}
            critic_files.write_state(folder, state | {"rate_ratio": self._critic.rate_ratio})

    def _check_checkpoint(self, folder: str) -> None:
        """Raises ConfigError unless the checkpoint holds a critic of this kind."""
        critic_files.check(folder, self._critic.name)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Overrides transformers.Trainer._load_from_checkpoint: the critic's weights as well."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._critic.load(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Overrides trl_ext.GRPOTrainer._load_optimizer_and_scheduler: running statistics as well."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = critic_files.read_state(checkpoint)
        self._kl.load_state_dict(state["kl"])
        self._scoring.load_state_dict(state["scores"])
        self._critic.resume_from(checkpoint)

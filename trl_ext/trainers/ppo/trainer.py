"""`trl_ext.PPOTrainer`: the PPO that TRL removed in 1.13, on GRPOTrainer's engine.

GRPOTrainer generates, scores and computes the clipped policy loss. PPO adds a critic, the KL in the reward,
generalized advantages and a value loss. This file has the hooks that TRL calls. Legend: B rows, T completion tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from accelerate.utils import set_seed
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trl_ext.compat.peft import base_model
from trl_ext.compat.swap import swapped
from trl_ext.compat.versions import check_versions
from trl_ext.errors import ConfigError
from trl_ext.memory.models.find import check_here
from trl_ext.trainers.fit.plan import settle_memory
from trl_ext.trainers.fit.rehearsal.state import random_numbers_restored
from trl_ext.trainers.forward.value_head import hidden_from_names, hide_heads_from_vllm
from trl_ext.trainers.grpo.critic import CriticHooks
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.critic.critics import Critic, CriticStarts, SeparateCritic, split_group
from trl_ext.trainers.ppo.critic.in_step import CriticInStep
from trl_ext.trainers.ppo.critic.scale import ValueScale
from trl_ext.trainers.ppo.critic.schedule import OF_CRITIC, ActorWaits, factors
from trl_ext.trainers.ppo.critic.values import CriticValues
from trl_ext.trainers.ppo.episodes import Episodes
from trl_ext.trainers.ppo.inputs import TokenizedPrompt, check_arguments, listed, with_prompts
from trl_ext.trainers.ppo.models import GivenModels, PPOModels
from trl_ext.trainers.ppo.objective.equations import AdaptiveKL
from trl_ext.trainers.ppo.objective.kl import KLTerm
from trl_ext.trainers.ppo.scores.completion_scores import CompletionScores
from trl_ext.trainers.ppo.statistics import RunningStatistics
from trl_ext.trainers.ppo.targets import HeldOut, PPOTargets, TargetPasses


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
        data_collator: Accepted as in TRL 1.12, and not used.
        reward_funcs: A RuleSet or other reward functions, together with reward models or instead of them.
            `reward_weights` gives the weights of these functions first, then the weights of the reward models.
        reward_processing_classes: Tokenizers of the reward models, if they are not saved with the weights.
        reward_adapter: Folder of a LoRA reward model of the actor's backbone, or several; each is one more adapter.
        grpo_options: Other arguments of TRL's GRPOTrainer, such as `tools` and `rollout_func`.

    Metrics, in addition to GRPOTrainer's:
        objective/scores, objective/kl, objective/non_score_reward, objective/rlhf_reward: Means over completions.
        loss/policy_avg, loss/value_avg, val/clipfrac_avg: Of the optimizer steps.
        ppo/kl_coef, ppo/explained_variance, ppo/value_mean, ppo/return_mean, ppo/unscored_frac: Of the episodes.
        ppo/value_scale_mean, ppo/value_scale_std: The scale on which the critic predicts.
        episode: Episodes sampled so far.

    Raises:
        ConfigError: for models, settings and checkpoints that cannot work together, before the first step.
    """

    _tag_names: ClassVar = ["trl", "ppo"]  # type: ignore[misc]  # TRL names no ClassVar
    _name = "PPO"
    memory_kind = "ppo"
    _takes_turns = True
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
    _scale: ValueScale
    _targets: PPOTargets
    _passes: TargetPasses

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
        reward_adapter: str | Sequence[str] | None = None,
        **grpo_options: Any,
    ):
        check_versions()
        check_here(model)  # before its tokenizer loads
        rules, models, adapters = listed(reward_funcs), listed(reward_model), listed(reward_adapter)
        rollout_func = grpo_options.get("rollout_func")
        # An environment may score its completions itself (`get_reward`).
        sources = [*rules, *listed(grpo_options.get("environment_factory"))]
        check_arguments(
            args, model, ref_model, value_model, [*models, *adapters], sources, rollout_func, data_collator
        )
        grpo_options |= {"peft_config": peft_config, "callbacks": callbacks, "optimizers": optimizers}
        settle_memory(
            "ppo",
            args,
            grpo_options,
            model,
            tokenizer=processing_class,
            dataset=train_dataset,
            has_value_model=value_model is not None,
            num_reward_models=len(models),
            num_reward_adapters=len(adapters),
        )
        given = GivenModels(
            actor=model,
            reference=ref_model,
            value_model=value_model,
            rewards=models,
            reward_tokenizers=reward_processing_classes,
            reward_adapters=adapters,
            tokenizer=processing_class,
            peft_config=grpo_options["peft_config"],
        )
        self._ppo_models = PPOModels(self, args, given)
        self._scoring = self._ppo_models.scoring(len(rules))
        self._completion_scores = CompletionScores(self._scoring, self._ppo_models.rewards)
        self._kl = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        self._kl_term = KLTerm(self, self._kl, args.kl_estimator)
        value_models = [] if self._ppo_models.value_model is None else [self._ppo_models.value_model]
        self._critic_hooks = CriticHooks(value_models)  # until the critic is made
        self._most_rows = args.local_rollout_forward_batch_size
        self._kl_is_added_to = "every row" if args.kl_term == "loss" else "every row's reward"
        self._ppo_models.choose_reference()
        functions, tokenizer = [*rules, *self._ppo_models.rewards], self._ppo_models.tokenizer
        roles = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        datasets = [with_prompts(dataset, tokenizer, role) for role, dataset in roles.items()]
        # TRL would load a reference again by the model's name, which may not be what the model is now.
        with swapped(args, beta=args.beta if isinstance(model, str) and ref_model is None else 0.0):
            super().__init__(model, functions, args, *datasets, tokenizer, **grpo_options)
        if self._are_images_padded and not self._critic.comes_with_log_probs and self._critic.has_values:
            raise ConfigError(
                f"critic='{self.args.critic}' reads images in packed rows only, and these are padded: "
                f"{self._why_not_packing() or 'packing is off'}. Set critic='head' or critic='none'."
            )
        self.given_rewards = [*rules, *models, *adapters]

    def _add_models(self) -> None:
        """Overrides trl_ext.GRPOTrainer._add_models: reference, critic and reward models join the actor."""
        self.beta = self._kl.value
        self.ref_model = self._ppo_models.prepare_reference()
        self._critic = self._ppo_models.make_critic()
        self._ppo_models.prepare_rewards()
        if isinstance(self._critic, SeparateCritic):
            self.add_callback(CriticStarts(self._critic))
        if self.args.critic_warmup_steps:
            self.add_callback(ActorWaits(self.args.critic_warmup_steps))
        self._put_reward_models_last()
        self._reward_calls.num_called = self._scoring.num_rules
        self._set_stop_tokens()
        if self.use_vllm:
            hide_heads_from_vllm(self.vllm_generation, base_model(self.model))
        self._values = CriticValues(self, self._critic, self._get_per_token_logps_and_entropies)
        self._scale = ValueScale(self.args.value_normalisation)
        self._critic_in_step = CriticInStep(self, self._critic, self._values, self._scale, self._planner)
        self._critic_hooks = self._critic_in_step
        self._passes = TargetPasses(
            self, self._old_policy, self._planner, self._get_per_token_logps_and_entropies, values=self._values
        )
        self._targets = PPOTargets(
            self.args, self._kl, self._values, self._scale, self.accelerator, self.eos_token_ids
        )
        self._episodes = Episodes(
            self, self._reward_calls, self._completion_scores, self._targets, self._passes, self._greedy_scores
        )
        statistics = RunningStatistics(self._kl, self._scoring, self._scale, self._critic)
        # Episodes come first, since ReMax generates for the rows before the other parts see them.
        others = [self._completion_scores, self._kl_term, self._critic_in_step, statistics]
        self._parts = [self._episodes, *self._parts, *others]

    def _put_reward_models_last(self) -> None:
        """Move rewards of environments, which TRL puts behind the reward models, to the rules, which TRL calls."""
        first, last = self._scoring.num_rules, self._scoring.num_rules + len(self._ppo_models.rewards)
        lists: list[list[Any]] = [self.reward_funcs, self.reward_func_names, self.reward_processing_classes]
        for values in lists:
            values[first:] = values[last:] + values[first:last]
        weights = self.reward_weights
        self.reward_weights = torch.cat([weights[:first], weights[last:], weights[first:last]])
        self._scoring.num_rules += len(weights) - last

    def _set_stop_tokens(self) -> None:
        """Use TRL 1.12's `stop_token` and `stop_token_id`, if given, instead of the model's EOS tokens."""
        if self.args.stop_token is None and self.args.stop_token_id is None:
            return
        given, num_tokens = self.args.stop_token_id, base_model(self.model).config.get_text_config().vocab_size
        if given is not None and given >= num_tokens:
            raise ConfigError(f"stop_token_id={given} would end no completion: the model has {num_tokens} tokens.")
        self.eos_token_ids = [self._tokenizer.eos_token_id if given is None else given]
        if self.use_vllm:
            options = self.vllm_generation.generation_kwargs or {}
            # Else vLLM also stops at the EOS tokens of tokenizer and generation config.
            stops = {"stop_token_ids": self.eos_token_ids, "ignore_eos": True}
            self.vllm_generation.generation_kwargs = options | stops
        else:
            self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            self.generation_config.eos_token_id = self.eos_token_ids

    # Rollouts -----------------------------------------------------------------------------------------------------

    @property
    def _scores(self) -> torch.Tensor:
        """[B of all ranks] of the rollouts that were scored last."""
        return self._completion_scores.scores

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """Overrides trl.GRPOTrainer._tokenize_prompts: keeps the token ids of a tokenized dataset."""
        if isinstance(prompts[0], TokenizedPrompt):
            return [prompt.ids for prompt in prompts], None, {}
        return super()._tokenize_prompts(prompts)

    def _greedy_scores(self, inputs: Any) -> torch.Tensor:
        """Return [B] the score of each prompt's greedy completion; logs and metrics stay unchanged."""
        logs: dict[str, Any] = {name: [] for name in ("images", "prompt", "completion", "advantages")}
        logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
        changes: dict[str, Any] = {"beta": 0.0, "num_generations_eval": self.num_generations}
        changes |= {"_metrics": {"eval": defaultdict(list)}, "_logs": logs}
        self.model.eval()
        with swapped(self, **changes), swapped(self.args, eval_temperature=0.0):
            output = self._generate_and_score_completions(inputs)
        self.model.train()
        scores = self._scores.split(len(inputs))[self.accelerator.process_index]
        return scores - self._targets.missing_eos_penalty(output)

    # Evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Overrides trl_ext.GRPOTrainer.evaluate: with the same random numbers at every step, and training's restored
        afterwards; collects the critic's errors."""
        with random_numbers_restored(), swapped(self._episodes, held_out=HeldOut(self._scale)):
            set_seed(self.args.seed, device_specific=True)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    # Training -----------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Overrides transformers.Trainer.create_optimizer: gives the critic its learning rate."""
        is_new, args = self.optimizer is None, self.args
        optimizer = super().create_optimizer(model)
        has_own_rate = args.value_learning_rate is not None or self._has_own_schedule
        if is_new and self._critic.is_trained_with_actor and has_own_rate:
            rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
            split_group(optimizer, self._critic, rate)
        return optimizer

    @property
    def _has_own_schedule(self) -> bool:
        """True if the critic's schedule differs from the actor's."""
        return self.args.critic_warmup_steps > 0 or self.args.value_lr_scheduler_type is not None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Overrides transformers.Trainer.create_scheduler: separate schedules for actor and critic."""
        is_new = self.lr_scheduler is None
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if not is_new or not self._has_own_schedule:
            return schedule
        found = factors(self.args, num_training_steps)
        self._critic.factor = found.critic
        optimizer = optimizer or self.optimizer
        of_groups = [found.critic if group.get(OF_CRITIC) else found.actor for group in optimizer.param_groups]
        self.lr_scheduler = LambdaLR(optimizer, of_groups)
        return self.lr_scheduler

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Overrides trl_ext.GRPOTrainer._compute_loss: PPO's KL instead of GRPO's, and the value loss."""
        is_warmup = self.state.global_step < self.args.critic_warmup_steps
        value_loss = self._critic_in_step.loss_before_policy(model, inputs, is_warmup=is_warmup)
        with swapped(self, beta=0.0):
            loss = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        self.record_metric("loss/policy_avg", loss.detach())
        loss = self._kl_term.add_to(loss, inputs)
        if is_warmup:
            loss = loss * 0.0  # gradients of 0 leave the moments of the actor's Adam and the clip norm at 0
        return self._critic_in_step.add_to(loss, value_loss, model, inputs)

    # Saving and resuming ------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Overrides transformers.Trainer._save: the actor as plain transformers or PEFT, and the critic."""
        output_dir = output_dir or str(self.args.output_dir)
        critic = self._critic.gathered(state_dict)
        with hidden_from_names(base_model(self.model)):
            super()._save(output_dir, state_dict and critic_files.without_value_head(state_dict))
        if self.args.should_save:
            critic_files.write_kind(output_dir, self._critic.name, self._scale.line)
            self._critic.save(output_dir, critic)

"""The models of PPO: how reference, reward models and critic are loaded, prepared and kept out of the actor's way."""

from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import TrainerCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from trl_ext.errors import ConfigError
from trl_ext.packing.check import CheckResult
from trl_ext.trainers.forward.value_head import hidden_from_names
from trl_ext.trainers.grpo.self_check import check_values
from trl_ext.trainers.ppo.critic.critics import make_critic
from trl_ext.trainers.ppo.inputs import check_value_model, listed, load_classifier, reward_name, tokenizer_of
from trl_ext.trainers.ppo.reference import prepare_frozen
from trl_ext.trainers.ppo.scores.reward_models import RewardModel
from trl_ext.trainers.ppo.scores.shared_reward import SharedRewardModel


class Models:
    """Mixed into PPOTrainer, before GRPOTrainer."""

    def _load_reward_models(self, models, adapter, args, tokenizers, actors_tokenizer) -> list[RewardModel]:
        if args.score_mode == "rules_only":
            return []
        tokenizers = listed(tokenizers) or [None] * len(models)
        if len(tokenizers) != len(models):
            raise ConfigError(
                f"{len(tokenizers)} reward_processing_classes for {len(models)} reward models. Give one for each."
            )
        options = dict(
            max_tokens_per_forward=args.reward_tokens_per_forward,
            autocast=lambda: self.accelerator.autocast(),
            agree=lambda num_forwards: self._agreed_num_forwards(num_forwards),
            chat_template_kwargs=args.chat_template_kwargs,
        )
        scorers = []
        for i, (given, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
            model = load_classifier(given, args)
            tokenizer = tokenizer_of(model, tokenizer, actors_tokenizer)
            scorers.append(RewardModel(model, tokenizer, reward_name(model, i), **options))
        return scorers + [SharedRewardModel(folder, actors_tokenizer, **options) for folder in listed(adapter)]

    def _add_models(self) -> None:
        """Overrides trl_ext.GRPOTrainer._add_models: reference, reward models and critic join the actor."""
        self.beta = self._kl.value
        if self._reference is not None:
            add_fused_lm_head(self._reference, self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
            self.ref_model = prepare_frozen(self._reference, self)
        if self._value_model is not None:
            check_value_model(self._value_model, self.model.config, self.processing_class)
            if self.args.disable_dropout:
                disable_dropout_in_model(self._value_model)
        self._critic = make_critic(self._critic_kind, self, self._value_model, self._reward_adapter)
        for scorer in self._reward_models:
            if isinstance(scorer, SharedRewardModel):
                scorer.attach(self)
            else:
                scorer.wrapped = prepare_frozen(scorer.wrapped, self)
        if not self._critic.is_trained_with_actor:
            self.add_callback(CriticStarts(self))
        self._set_stop_tokens()
        if self.use_vllm:
            self._hide_critic_from_vllm()

    def _set_stop_tokens(self) -> None:
        """TRL 1.12's `stop_token` and `stop_token_id`, where given, instead of the model's EOS tokens."""
        if self.args.stop_token is None and self.args.stop_token_id is None:
            return
        given = self.args.stop_token_id
        self.eos_token_ids = [self._tokenizer.eos_token_id if given is None else given]
        if self.use_vllm:
            options = self.vllm_generation.generation_kwargs or {}
            self.vllm_generation.generation_kwargs = options | {"stop_token_ids": self.eos_token_ids}
        else:
            self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            self.generation_config.eos_token_id = self.eos_token_ids

    def _hide_critic_from_vllm(self) -> None:
        """vLLM's model has no value head; a name that it does not know would stop the run."""
        push = self.vllm_generation.sync_weights

        def push_actor() -> None:
            with hidden_from_names(self._bare_actor()):
                push()

        self.vllm_generation.sync_weights = push_actor

    def _bare_actor(self) -> Any:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _models(self) -> list[Any]:
        """Overrides trl_ext.GRPOTrainer._models: the value model forwards flat rows, too."""
        return super()._models() + ([] if self._value_model is None else [self._value_model])

    def _self_check(self, model: Any) -> CheckResult:
        """Overrides trl_ext.GRPOTrainer._self_check: the value model must be exact, too."""
        result = super()._self_check(model)
        if self._value_model is None or not result.is_exact:
            return result
        was_training = self._value_model.training
        self._critic.wrapped.eval()
        result = check_values(
            self._critic.wrapped,
            vocab_size=self._value_model.config.get_text_config().vocab_size,
            device=self.accelerator.device,
            autocast=self.accelerator.autocast,
            half_precision=self._value_model.dtype != torch.float32 or self.accelerator.mixed_precision != "no",
            share_prompt=self._share_prompt,
        )
        self._critic.wrapped.train(was_training)
        return result


class CriticStarts(TrainerCallback):
    """Prepares a separate critic when the actor's optimizer and schedule stand, and goes on from its checkpoint."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.start_critic()

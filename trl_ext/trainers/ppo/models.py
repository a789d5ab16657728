"""PPO's models in addition to the actor: reference, reward models and critic."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from trl_ext.compat.peft import add_adapter, base_model, copy_adapter
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.reward_input import read_record, record_of
from trl_ext.trainers.forward.roles import reward_role
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic.critics import AdapterCritic, Critic, HeadCritic, SeparateCritic
from trl_ext.trainers.ppo.inputs import check_value_model, choose_critic, listed, load_classifier, tokenizer_in
from trl_ext.trainers.ppo.scores.combine import ScoreNormaliser, Scoring
from trl_ext.trainers.ppo.scores.reward_adapter import SharedRewardModel
from trl_ext.trainers.reward.scorer import CompletionScorer, RewardModel, scorer_options
from trl_ext.trainers.step.sequence_parallel import check_models, size_of_groups

REFERENCE = "ref"  # the name of the adapter that TRL looks for


@dataclass(frozen=True, slots=True)
class GivenModels:
    """The models that the user gave; each may be a path.

    Args:
        actor, reference, value_model: The last two may be None.
        rewards: Complete reward models.
        reward_tokenizers: None, a tokenizer or a list with a tokenizer for each of `rewards`.
        reward_adapters: Folders of reward models that are LoRA of the actor's base model.
        tokenizer: The actor's, or None.
        peft_config: Makes the actor a PeftModel; or None.
    """

    actor: Any
    reference: Any
    value_model: Any
    rewards: list[Any]
    reward_tokenizers: Any
    reward_adapters: list[str]
    tokenizer: Any
    peft_config: Any

    def lora(self, name: str | None) -> Any:
        """Return the config of the actor's adapter `name`, or of its active adapter; None if it gets no adapter."""
        if self.peft_config is not None or isinstance(self.actor, str) or not is_peft_model(self.actor):
            return self.peft_config
        adapters = self.actor.peft_config
        return adapters.get(name, adapters[self.actor.active_adapter])


class PPOModels:
    """Loads the models and, after the actor is built, attaches them; `trainer` is not built yet.

    Attributes:
        tokenizer: The actor's.
        value_model: The unwrapped model of a separate critic; None for other critics.
        rewards: Reward models, in the order of their weights.
        reference: The unwrapped reference model, or None if TRL has it or none is needed.
    """

    def __init__(self, trainer: GRPOTrainer, args: PPOConfig, given: GivenModels):
        self._trainer, self._args, self._given = trainer, args, given
        lora = given.lora(args.model_adapter_name)
        self._kind = choose_critic(args, lora, given.value_model, given.reward_adapters, given.rewards)
        if self._kind == "adapter":
            # The forwards of actor and critic together use all trained weights.
            args.ddp_find_unused_parameters = False
        self._checkpointing = copy.copy(args.gradient_checkpointing_kwargs)
        set_seed(args.seed)  # a new `score` is drawn at random
        path = given.actor if isinstance(given.actor, str) else given.actor.config._name_or_path
        self.tokenizer = given.tokenizer or AutoTokenizer.from_pretrained(
            path, truncation_side="left", padding_side="left"
        )
        self.value_model = None if given.value_model is None else load_classifier(given.value_model, args)
        if self._kind == "separate" and self.value_model is None:  # critic_init="reward"
            start = given.rewards[0]
            self.value_model = load_classifier(start, args) if isinstance(start, str) else copy.deepcopy(start)
        self.rewards = self._load_rewards()
        self.reference: Any = None

    def _load_rewards(self) -> list[CompletionScorer]:
        args, models = self._args, self._given.rewards
        tokenizers = listed(self._given.reward_tokenizers) or [None] * len(models)
        if len(tokenizers) != len(models):
            raise ConfigError(
                f"{len(tokenizers)} reward_processing_classes for {len(models)} reward models. Give one for each."
            )
        options = scorer_options(self._trainer, args, self.tokenizer)
        scorers: list[CompletionScorer] = []
        for i, (given, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
            model = load_classifier(given, args)
            if tokenizer is None:
                tokenizer = tokenizer_in(model.config._name_or_path, self.tokenizer)
            name = Path(model.config._name_or_path).name or f"reward_model_{i}"
            record = record_of(base_model(model), given if isinstance(given, str) else model.config._name_or_path)
            scorers.append(RewardModel(model, tokenizer, name, record=record, **options))
        for i, folder in enumerate(self._given.reward_adapters):
            # The actor's tokens, with the pad token and the chat template of the adapter's training.
            tokenizer = tokenizer_in(folder, self.tokenizer)
            name = Path(folder).name
            if name in {scorer.name for scorer in scorers}:
                name = f"{name}_{i}"
            scorers.append(SharedRewardModel(name, tokenizer, reward_role(i), record=read_record(folder), **options))
        return scorers

    def scoring(self, num_rules: int) -> Scoring:
        """Return the scoring of completions by `num_rules` rules and the reward models."""
        args = self._args
        normaliser = ScoreNormaliser(args.score_normalisation, args.score_clip)
        return Scoring(num_rules, self.rewards, normaliser, args.score_mode, args.gate_above)

    def choose_reference(self) -> None:
        """Choose the trained adapter and the reference of the KL; this may change adapters of the actor.

        TRL makes the reference of a path, and the reference of an actor with adapters, which it switches off.
        """
        given, args, actor = self._given, self._args, self._given.actor
        source, has_adapters = args.ref_adapter_name, not isinstance(actor, str) and is_peft_model(actor)
        if args.model_adapter_name is not None:
            _activate_adapter(actor, args.model_adapter_name)
        if args.beta == 0:
            return
        if source is not None and (given.reference is not None or not has_adapters):
            reason = "the model has no adapters yet" if given.reference is None else "ref_model is the reference"
            raise ConfigError(f"ref_adapter_name={source!r} has no effect: {reason}. Leave it out.")
        if given.reference is not None:
            self.reference = _load_causal_model(given.reference, args).eval().requires_grad_(False)
        elif has_adapters:
            add_reference_adapter(actor, source)
        elif given.peft_config is None and not isinstance(actor, str):
            self.reference = _copy_of(actor).eval().requires_grad_(False)

    def prepare_reference(self) -> Any:
        """Return the wrapped reference with TRL's fused head, or the trainer's reference if there is no other."""
        trainer = self._trainer
        if self.reference is None:
            return trainer.ref_model
        add_fused_lm_head(self.reference, trainer.temperature, cast_lm_head_to_fp32=self._args.cast_lm_head_to_fp32)
        return prepare_frozen(self.reference, trainer)

    def make_critic(self) -> Critic:
        """Make the critic and attach it to the trainer's actor."""
        trainer, args = self._trainer, self._args
        if self.value_model is not None:
            actor: Any = trainer.model
            check_value_model(self.value_model.config, actor.config, self.tokenizer)
            if args.disable_dropout:
                disable_dropout_in_model(self.value_model)
            return SeparateCritic(trainer, self.value_model, args.value_learning_rate)
        if self._kind == "none":
            return Critic()
        from_reward = args.critic_init == "reward"
        if self._kind == "head":
            return HeadCritic(trainer, load_classifier(self._given.rewards[0], args).score if from_reward else None)
        # Issue: TRL makes LoRA's checkpointing reentrant under ZeRO-3, for DeepSpeed before 0.19.4; roles mix in it.
        # Fixed in: not yet.
        # Remove when: TRL leaves `use_reentrant` alone.
        args.gradient_checkpointing_kwargs = self._checkpointing
        return AdapterCritic(
            trainer,
            self._given.reward_adapters,
            disable_dropout=args.disable_dropout,
            starts_from_reward=from_reward,
        )

    def prepare_rewards(self) -> None:
        """Wrap the reward models and move them to their devices; after the critic was made."""
        for scorer in self.rewards:
            scorer.group = self._trainer.sequence_group
            if isinstance(scorer, SharedRewardModel):
                scorer.attach(self._trainer)
            else:
                check_models([scorer.model], size_of_groups(self._args))
                scorer.wrapped = prepare_frozen(scorer.wrapped, self._trainer)


def _activate_adapter(actor: Any, name: str) -> None:
    """Make an adapter of the actor the trained adapter; ConfigError if the actor does not have it."""
    adapters = getattr(actor, "peft_config", {})
    if isinstance(actor, str) or not is_peft_model(actor) or name not in adapters:
        listed_names = ", ".join(adapters) or "it has none"
        raise ConfigError(f"model_adapter_name='{name}' is none of the model's adapters: {listed_names}.")
    actor.set_adapter(name)


def _load_causal_model(model: Any, args: PPOConfig) -> Any:
    """Return the causal language model, loaded as the actor is if it is a path."""
    options: Any = args.model_init_kwargs or {}
    return AutoModelForCausalLM.from_pretrained(model, **options) if isinstance(model, str) else model


def _copy_of(actor: Any) -> Any:
    """Return a copy of a loaded actor; ConfigError under ZeRO-3, where no process has the whole weights."""
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "Under ZeRO-3 the weights of a loaded model are spread over the processes, so it cannot be copied. "
            "Give the model as a path, or give ref_model."
        )
    return copy.deepcopy(actor)


def add_reference_adapter(model: Any, source: str | None) -> None:
    """Add a frozen copy of a PeftModel's adapter as the reference; None: the active adapter, unless untrained."""
    name = source or model.active_adapter
    if name not in model.peft_config:
        raise ConfigError(
            f"ref_adapter_name='{name}' is none of the model's adapters: {', '.join(model.peft_config)}."
        )
    products = [weight for key, weight in model.named_parameters() if f"lora_B.{name}." in key]
    is_fresh = bool(products) and not any(weight.any() for weight in products)
    if name == REFERENCE or (source is None and is_fresh):
        return
    active = model.active_adapter
    add_adapter(model, REFERENCE, copy.deepcopy(model.peft_config[name]))
    copy_adapter(model, name, REFERENCE)
    model.set_adapter(active)


def prepare_frozen(model: Any, trainer: GRPOTrainer) -> Any:
    """Wrap a model that is not trained, and move it to its device."""
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)

"""`trl_ext.PPOTrainer`: the PPO that TRL removed in 1.13, alive on GRPOTrainer's engine.

GRPO generates, scores and computes the clipped policy loss. PPO adds a critic, the KL in the reward, generalized
advantages and a value loss. Legend: B rows, T completion tokens.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from trl_ext.compat.trl import print_samples
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.value_head import hidden_from_names
from trl_ext.trainers.gradient_sync import gradients_unsynced
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.memory.plan import Inputs, settle_memory
from trl_ext.trainers.memory.rehearsal.inputs import MicroBatch, with_targets
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.critic.critics import choose_critic, split_group
from trl_ext.trainers.ppo.inputs import check_models, listed, load_classifier, load_tokenizer, with_prompts
from trl_ext.trainers.ppo.kl import AdaptiveKL
from trl_ext.trainers.ppo.models import Models
from trl_ext.trainers.ppo.reference import choose_adapter, choose_reference
from trl_ext.trainers.ppo.rollouts import Rollouts
from trl_ext.trainers.ppo.scores.scoring import Scoring
from trl_ext.trainers.ppo.value_loss import clipped_value_loss

logger = logging.get_logger(__name__)


class PPOTrainer(Models, Rollouts, GRPOTrainer):
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

    _tag_names: ClassVar = ["trl", "ppo"]
    _name = "PPO"
    memory_kind = "ppo"
    _paper: ClassVar = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": "@article{schulman2017proximal,\n    title  = {{Proximal Policy Optimization Algorithms}},\n"
        "    author = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},\n"
        "    year   = 2017,\n    eprint = {arXiv:1707.06347}\n}",
    }

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
        if not isinstance(args, PPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}. Give a PPOConfig: PPOTrainer(args=PPOConfig(...), ...)."
            )
        if args.fsdp:
            raise ConfigError("PPOTrainer runs under DDP and DeepSpeed, not FSDP. Use accelerate_configs/zero3.yaml.")
        self._rules, models = listed(reward_funcs), listed(reward_model)
        check_models(args, model, ref_model, value_model, [*models, *listed(reward_adapter)], self._rules)
        if data_collator is not None:
            logger.warning("data_collator is not used: prompts are batched as lists and padded after generation.")
        settled = settle_memory(
            self.memory_kind,
            args,
            Inputs(
                model,
                peft_config,
                grpo_options.get("quantization_config"),
                processing_class,
                train_dataset,
                "adapter" if reward_adapter else "copy" if models else "none",
                has_value_model=value_model is not None,
            ),
        )
        peft_config = settled.peft_config
        if settled.quantization_config is not None:
            grpo_options["quantization_config"] = settled.quantization_config
        is_peft = peft_config is not None or (not isinstance(model, str) and is_peft_model(model))
        self._critic_kind = choose_critic(args, is_peft, value_model, reward_adapter)
        if self._critic_kind == "adapter" and args.ddp_find_unused_parameters is None:
            # The actor's forward uses some of the trained weights and the critic's the others: together all.
            args.ddp_find_unused_parameters = False
        set_seed(args.seed)  # a new `score` is drawn at random
        tokenizer = processing_class or load_tokenizer(model)
        self._value_model = None if value_model is None else load_classifier(value_model, args)
        self._reward_models = self._load_reward_models(
            models, reward_adapter, args, reward_processing_classes, tokenizer
        )
        self._reward_adapter = None if args.score_mode == "rules_only" else reward_adapter
        self._scoring = Scoring(args, len(self._rules), self._reward_models)
        self._kl = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        choose_adapter(model, args.model_adapter_name)
        self._reference = choose_reference(model, ref_model, is_peft, args)
        self._seen_values: list[torch.Tensor] = []
        self._resumed_from: str | None = None
        # TRL would load a reference again by the model's name, which may not be what the model is now.
        args.beta = self._kl.value if isinstance(model, str) and ref_model is None else 0.0
        try:
            super().__init__(
                model,
                [*self._rules, *self._reward_models],
                args,
                with_prompts(train_dataset, tokenizer),
                None if eval_dataset is None else with_prompts(eval_dataset, tokenizer),
                tokenizer,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                **grpo_options,
            )
        finally:
            args.beta = self._kl.value

    def _plan_memory(self, model, rewards, args, dataset, options) -> None:
        """Overrides trl_ext.GRPOTrainer._plan_memory: it is settled by then, before the critic."""

    # Training -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, **options):
        """Overrides transformers.Trainer.train: a checkpoint without its critic is refused before anything loads."""
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        if isinstance(checkpoint, str):
            critic_files.check(checkpoint, self._critic.name)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)

    def start_critic(self) -> None:
        """Wrap a separate critic and make its optimizer, or go on with those of a checkpoint."""
        self._critic.prepare()
        if self._resumed_from is not None:
            self._critic.load_training_state(self._resumed_from)

    def create_optimizer(self, model=None):
        """Overrides transformers.Trainer.create_optimizer: the critic at its own learning rate."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.args.value_learning_rate is not None and self._critic.is_trained_with_actor:
            split_group(optimizer, self._critic.parameters(), self.args.value_learning_rate)
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Overrides trl_ext.GRPOTrainer.compute_loss: keeps the micro-batch for a separate critic."""
        if self._rescue.serving is None:
            self._micro_batch = inputs
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        """Overrides trl_ext.GRPOTrainer._compute_loss: without KL, which is in the reward; with the value loss."""
        self._seen_values.clear()
        self.beta, beta = 0.0, self.beta
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        if "returns" not in inputs:  # evaluation
            return loss
        self._note("loss/policy_avg", loss.detach() * self.current_gradient_accumulation_steps)
        if not self._critic.is_trained_with_actor:
            return loss
        values = self._seen_values[0] if self._critic.comes_with_log_probs else self._batch_values(model, inputs)
        return loss + self._value_loss(values, inputs)

    def _batch_values(self, model, inputs) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return self._values(model, ids, mask, inputs["completion_ids"].size(1))

    def _value_loss(self, values: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Weighted; over the micro-batches and ranks of an optimizer step it adds up to a mean over tokens."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        num_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes * share
        result = clipped_value_loss(
            values, inputs["values"], inputs["returns"], mask, self.args.cliprange_value, num_tokens
        )
        self._note("loss/value_avg", result.loss.detach() * self.current_gradient_accumulation_steps)
        self._note("val/clipfrac_avg", result.num_clipped / mask.sum().clamp(min=1))
        return self.args.vf_coef * result.loss

    def _note(self, name: str, value: torch.Tensor) -> None:
        """Log the mean over ranks. Collective."""
        self._metrics["train"][name].append(self.accelerator.reduce(value.float(), reduction="mean").item())

    def training_step(self, model, inputs, num_items_in_batch):
        """Overrides trl_ext.GRPOTrainer.training_step: a separate critic goes backward when the actor has."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._critic.is_trained_with_actor:
            with self._clock.phase("update"):
                loss = loss + self._critic_step(model, self._micro_batch)
        self._micro_batch = None
        return loss

    def _critic_step(self, model, inputs) -> torch.Tensor:
        """Forward and backward of a separate critic, in pieces where memory asks for it; the value loss."""
        losses = []

        def attempt(piece: dict[str, Any], is_last: bool) -> None:
            wrapped = self._critic.wrapped
            with nullcontext() if is_last else gradients_unsynced(self.accelerator, wrapped):
                with self._critic.accumulation():
                    loss = self._rescue.forward(
                        wrapped, lambda: self._value_loss(self._batch_values(model, piece), piece)
                    )
                    self._critic.backward_and_step(loss)
            losses.append(loss.detach())

        self._rescue.run("critic", inputs, attempt)
        return torch.stack(losses).sum()

    def _largest_micro_batch(self) -> MicroBatch:
        """Overrides trl_ext.GRPOTrainer._largest_micro_batch: with PPO's targets."""
        return with_targets(super()._largest_micro_batch())

    def _rehearse(self, batch: MicroBatch) -> None:
        """Overrides trl_ext.GRPOTrainer._rehearse: a separate critic goes backward when the actor has."""
        self._critic.after_rollout()
        super()._rehearse(batch)
        if not self._critic.is_trained_with_actor:
            self._critic_step(self.model_wrapped, batch.inputs)

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

    # Saving and resuming ------------------------------------------------------------------------------------------

    def _save(self, output_dir=None, state_dict=None):
        """Overrides transformers.Trainer._save: the actor as plain transformers or PEFT, the critic beside it."""
        output_dir = output_dir or self.args.output_dir
        critic = self._critic.gathered(state_dict)
        with hidden_from_names(self._bare_actor()):
            super()._save(output_dir, state_dict and critic_files.without_value_head(state_dict))
        if self.args.should_save:
            critic_files.write_kind(output_dir, self._critic.name)
            self._critic.save(output_dir, critic)

    def _save_checkpoint(self, model, trial):
        """Overrides trl_ext.GRPOTrainer._save_checkpoint: the critic's optimizer and the running statistics."""
        super()._save_checkpoint(model, trial)
        if self.args.save_only_model:
            return
        folder = self._checkpoint_folder(trial)
        self._critic.save_training_state(folder)
        if self.args.should_save:
            critic_files.write_state(folder, {"kl": self._kl.state_dict(), "scores": self._scoring.state_dict()})

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Overrides transformers.Trainer._load_from_checkpoint: the critic's weights as well."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._critic.load(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Overrides trl_ext.GRPOTrainer._load_optimizer_and_scheduler: running statistics as well."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = critic_files.read_state(checkpoint)
        self._kl.load_state_dict(state["kl"])
        self._scoring.load_state_dict(state["scores"])
        self._resumed_from = checkpoint

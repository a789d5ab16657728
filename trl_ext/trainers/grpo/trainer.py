"""`trl_ext.GRPOTrainer`: TRL's GRPOTrainer on flat rows, with rules that fail all ranks together.

TRL computes the loss. This trainer changes how many tokens go through the model for it.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from trl.trainer.grpo_config import GRPOConfig as TRLGRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TRLGRPOTrainer

from trl_ext.compat.peft import base_model
from trl_ext.compat.swap import swapped
from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.compat.trl import num_experts
from trl_ext.monitor.pages.samples import FewCompletions
from trl_ext.packing.check import CheckResult
from trl_ext.packing.families.images import ImageReader, take_images, why_not_packed
from trl_ext.trainers.base.trainer import ExtendedTrainer
from trl_ext.trainers.fit.plan import by_name, settle_memory
from trl_ext.trainers.fit.rehearsal.inputs import MAX_TOKENIZED, MicroBatch, rollout_batch
from trl_ext.trainers.forward.calls import let_positions_be_chosen
from trl_ext.trainers.forward.checkpointing import keep_layer_options
from trl_ext.trainers.generation.ahead import choose_correction
from trl_ext.trainers.generation.curriculum import Curriculum, check_curriculum
from trl_ext.trainers.generation.groups import EqualGroups, total_rewards
from trl_ext.trainers.generation.oversampling import Oversampling, check_oversample
from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.sampling import can_log_images, check_generated, generating, prepare_generation
from trl_ext.trainers.generation.vllm_servers import client_of
from trl_ext.trainers.grpo import rollout_state
from trl_ext.trainers.grpo.config import GRPOConfig
from trl_ext.trainers.grpo.critic import CriticHooks
from trl_ext.trainers.grpo.evaluation import EvaluatedRows
from trl_ext.trainers.grpo.log_probs import OldPolicy, UpdatePasses
from trl_ext.trainers.grpo.rewards import (
    RewardCalls,
    check_groups,
    per_rule,
    show_prompt_end,
    start_scoring,
    within_bounds,
)
from trl_ext.trainers.record.trainer import REPORT_VARIABLE
from trl_ext.trainers.reward.scorer import with_scorers
from trl_ext.trainers.rows.counted import num_rows_of
from trl_ext.trainers.rows.images import KEYS, check_images, check_padded
from trl_ext.trainers.rows.prompts import PromptChecks
from trl_ext.trainers.settings.checks import check_budget, check_moving, longest_prompt_tokens
from trl_ext.trainers.step.forward import StepForward, running_forward
from trl_ext.trainers.step.metrics import MetricSample, capture_metrics, merge_metrics
from trl_ext.trainers.step.plan import StepPlanner, check_update
from trl_ext.trainers.step.rows import WEIGHT
from trl_ext.trainers.step.score import LogProbs, PaddedBatch, score, score_batch
from trl_ext.trainers.step.self_check import check_causal_model
from trl_ext.trainers.step.settings import StepSettings, why_micro_batch_stays_whole, why_rows_stay


class GRPOTrainer(ExtendedTrainer, TRLGRPOTrainer):
    """Drop-in for `trl.GRPOTrainer`, which documents the arguments.

    A plain `trl.GRPOConfig` is fine: packing is then on where it is exact. `reward_funcs` takes a `RuleSet` like any
    other reward function.

    Metrics, one value per optimizer step:
        packing/forwarded_over_raw: Tokens through the model over real tokens; below 1 where prompts are shared.
        packing/padded_over_forwarded: Tokens that a padded batch would take over tokens through the model.
        phase/<name>_s: Seconds spent in generate, score, logps, update and other, on this rank.
    """

    args: TRLGRPOConfig
    memory_kind = "grpo"
    _kl_is_added_to = "every row"  # in words, where beta is not 0
    _critic_hooks = CriticHooks()
    _most_rows: int | None = None  # of a forward without gradient; None: as TRL asks
    _takes_turns = False  # a reward function may give each turn of a completion its own reward
    _takes_images = False  # rows or tools may bring some
    _are_images_padded = False  # they go through TRL's padded batches
    _evaluated: EvaluatedRows | None = None  # in the evaluation that runs

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *rest: Any,
        **kwargs: Any,
    ):
        args = self._checked(args, GRPOConfig, model)
        kwargs |= by_name(TRLGRPOTrainer.__init__, "eval_dataset", rest)
        check_moving(args)
        # Rewards, one for each rule; rows are checked against the columns that they read.
        self.given_rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        reward_funcs, reward_weights = per_rule(reward_funcs, args, kwargs)
        rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]  # TRL changes its list
        self._row_checks = PromptChecks(model, rewards, args, kwargs)
        self._row_checks.look_at(train_dataset, "train_dataset")
        self._row_checks.look_at(eval_dataset, "eval_dataset")
        if self.memory_kind == "grpo":  # PPOTrainer settles it before its other models load
            self._settle_memory(args, model, rewards, train_dataset, kwargs)
        # The plan may have set the batch: what depends on it comes after.
        check_oversample(args)
        check_groups(self.given_rewards, args)
        choose_correction(args)
        self._make_parts(args, train_dataset)
        with swapped(args, reward_weights=reward_weights, **self._oversampling.as_sampled), client_of(args):
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        # The model is loaded from here on.
        if self.aux_loss_enabled:  # dense models of such a family have none
            self.aux_loss_enabled = num_experts(base_model(self.model).config.get_text_config()) > 0
        self._settle_images(train_dataset)
        self._parts += prepare_generation(self, takes_images=self._takes_images)
        keep_layer_options(base_model(self.model), args.gradient_checkpointing_kwargs)
        self._add_models()
        self.reward_funcs = with_scorers(self, rewards, self._tokenizer)
        show_prompt_end(self.reward_funcs, self._tokenizer, args.chat_template_kwargs)
        # All models are there: the update can be judged, and packing begins.
        check_update(args, self._why_whole, self._why_zero_advantage_counts())
        self._check_longest_row()
        if getattr(args, "packing", True):
            self._start_packing()
        self._watch_memory("generate", "score", "update", "step")

    def _settle_memory(
        self, args: Any, model: Any, rewards: list[Any], train_dataset: Any, kwargs: dict[str, Any]
    ) -> None:
        """Let a plan for the cards set what `args.memory` asks for, before a model loads.

        Args:
            args: The config, changed in place.
            model: The policy, or its name.
            rewards: Reward functions; models and names among them take memory.
            train_dataset: For the length of the longest prompt.
            kwargs: TRL's other arguments, changed in place: the plan may set `peft_config`.
        """
        settle_memory(
            "grpo",
            args,
            kwargs,
            model,
            tokenizer=kwargs.get("processing_class"),
            dataset=train_dataset,
            num_reward_models=sum(isinstance(reward, (str, PreTrainedModel)) for reward in rewards),
        )

    def _make_parts(self, args: Any, train_dataset: Any) -> None:
        """Make what takes part in rollouts and updates; it needs no model."""
        self._reward_calls = RewardCalls(takes_turns=self._takes_turns)
        self._few_completions = FewCompletions()
        self._old_policy = OldPolicy(self)
        self._oversampling = Oversampling(args, has_groups=self.memory_kind == "grpo")
        self.equal_groups = EqualGroups()
        self.curriculum = None
        if self.memory_kind == "grpo" and (drawing := check_curriculum(args)) is not None:
            self.curriculum = Curriculum(drawing, args, train_dataset)
        # In the order in which they see a rollout.
        parts: list[RolloutPart | None] = [self.curriculum, self._reward_calls]
        parts.append(self._oversampling if self._oversampling.is_on else None)
        self._parts = [part for part in parts if part is not None]
        self._planner = StepPlanner(self)
        log_probs = self._get_per_token_logps_and_entropies
        self._passes = UpdatePasses(self, self._old_policy, self._planner, log_probs)

    def _settle_images(self, train_dataset: Any) -> None:
        """Find out whether rows or tools may bring images, and whether these need padded batches."""
        self._takes_images = self._is_vlm and (bool(self.tools) or self._row_checks.may_hold_images)
        packs = getattr(self.args, "packing", True)
        self._are_images_padded = self._takes_images and bool(not packs or self._why_not_packing())
        if self._are_images_padded:
            check_padded(train_dataset, self.args)
        self._oversampling.check_rows(takes_images=self._takes_images)

    def _check_longest_row(self) -> None:
        """Refuse a token budget that the longest prompt with the longest completion exceeds."""
        if self._max_tokens is None:
            return
        longest = longest_prompt_tokens(self, self._tokenize_prompts)
        if longest is not None and self.max_completion_length is not None:
            check_budget(longest, self.max_completion_length, self._max_tokens)

    @property
    def _why_whole(self) -> str:
        return why_micro_batch_stays_whole(
            self.args,
            takes_images=self._are_images_padded,
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_aux_loss=self.aux_loss_enabled,
        )

    @property
    def step_settings(self) -> StepSettings:
        """Return the current settings that forwards are planned by, with the limits of the loss."""
        skips = getattr(self.args, "skip_zero_advantage", None) is not False and not self._why_zero_advantage_counts()
        why_whole = self._why_whole
        stay = why_rows_stay(self.args, why_whole)
        settings, passes = super().step_settings, 1 + self._critic_hooks.num_passes
        reader = self.image_reader if settings.packs else None
        settings = replace(settings, why_whole=why_whole, why_rows_stay=stay, skips=skips)
        return replace(settings, num_passes=passes, reader=reader)

    @property
    def image_reader(self) -> ImageReader | None:
        """Return the reader of the rows' images; None if rows have no images or are padded."""
        is_needed = self._takes_images and not self._are_images_padded
        return ImageReader.of(base_model(self.model)) if is_needed else None

    def _why_zero_advantage_counts(self) -> str:
        """Return why a row of zero advantage is trained on; "" if it has no gradient."""
        if self.beta:
            return f"beta={self.beta} adds a KL penalty to {self._kl_is_added_to}"
        return self._critic_hooks.why_all_rows_count or self._why_whole

    def weights_by_role(self) -> dict[str, list[nn.Parameter]]:
        """Overrides trl_ext.ExtendedTrainer.weights_by_role: separates a critic's weights."""
        return self._critic_hooks.by_role(super().weights_by_role()["model"])

    def _add_models(self) -> None:
        """Add a subclass's models; called before packing is tried."""

    # Packing ------------------------------------------------------------------------------------------------------

    def _why_not_packing(self) -> str:
        if not self._takes_images:
            return super()._why_not_packing()
        why = next(filter(None, map(why_not_packed, self._models())), "")
        if not why and self.num_sharing > 1:
            why = f"have tokens that sequence_parallel={self.num_sharing} would cut"
        if not why and self.is_fsdp_enabled:
            why = "are not packed under FSDP, where two processes did not train what they train under DDP"
        return f"its rows or tools may bring images, which {why}" if why else super()._why_not_packing()

    def _stop_packing(self, reason: str) -> None:
        """Overrides trl_ext.PackingSwitch._stop_packing: refuses settings that padded images do not allow."""
        super()._stop_packing(reason)
        self._are_images_padded = self._takes_images
        if self._are_images_padded:
            check_padded(self.train_dataset, self.args)
        check_update(self.args, self._why_whole, self._why_zero_advantage_counts())

    def _longest_row_tokens(self) -> int | None:
        if self.rollout_func is not None or self.tools or self.max_completion_length is None:
            return None
        longest = longest_prompt_tokens(self, self._tokenize_prompts)
        return None if longest is None else longest + self.max_completion_length

    def _start_packing(self) -> None:
        for model in self._models():
            let_positions_be_chosen(model)
            if self._takes_images and not why_not_packed(model):
                take_images(model)
        super()._start_packing()

    def _self_check(self, model: Any) -> CheckResult:
        of_policy = check_causal_model(model, **self.check_options(self.model), reader=self.image_reader)
        return self._critic_hooks.self_check(of_policy)

    def _models(self) -> list[PreTrainedModel]:
        """Return the policy, the reference and a critic, unwrapped."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        own = [base_model(self.accelerator.unwrap_model(model)) for model in models]
        return own + self._critic_hooks.models

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Overrides trl.GRPOTrainer._get_per_token_logps_and_entropies: flat rows instead of padded ones."""
        for passes in (self._old_policy, self._passes):
            if (left_out := passes.placeholder(input_ids.size(0), logits_to_keep)) is not None:
                return left_out, None, None
        forward, batch_size = running_forward(), batch_size and (self._most_rows or batch_size)
        with self.clock.phase("update" if torch.is_grad_enabled() else "logps"):
            known = KEYS if self._takes_images else ()
            if not self._packs or any(value is not None for name, value in multimodal.items() if name not in known):
                with self._critic_hooks.scoring(model, logits_to_keep):
                    logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                        model,
                        input_ids,
                        attention_mask,
                        logits_to_keep,
                        batch_size=batch_size,
                        compute_entropy=compute_entropy,
                        compute_aux_loss=compute_aux_loss,
                        **multimodal,
                    )
                result = LogProbs(logps, entropies, aux_loss, input_ids.numel())
            elif forward is not None:
                result = self._scored_forward(model, forward, compute_entropy, compute_aux_loss)
            else:
                padded = PaddedBatch(input_ids, attention_mask, logits_to_keep, multimodal, batch_size)
                settings = self.step_settings
                result = score_batch(model, padded, settings, self.accelerator, compute_entropy, compute_aux_loss)
            if self.model.training:
                self.counts.add_forward(result.num_forwarded, attention_mask, of_update=forward is not None)
            for part in self._parts:
                part.after_scoring(self, result)
            self._old_policy.add_ratios(result.logps)
        return result.logps, result.entropies, result.aux_loss

    def _scored_forward(
        self, model: nn.Module, forward: StepForward, compute_entropy: bool, compute_aux_loss: bool
    ) -> LogProbs:
        """Return the log-probabilities of the running forward, in its layout.

        Args:
            model: As training calls it.
            forward: The running forward of the update.
            compute_entropy, compute_aux_loss: As in TRL.
        """
        rows = forward.calls()
        with self.accelerator.autocast():
            return score(
                model,
                forward.unpadded,
                rows,
                self.accelerator.device,
                num_forwards=len(rows),
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                group=self.step_settings.group,
                cache=forward.cache,
            )

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> Any:
        """Overrides trl.GRPOTrainer._prepare_inputs: in training returns the forwards of the micro-step, planned over
        the whole optimizer step."""
        self.check_packing(self.model_wrapped)
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        assert self._buffered_inputs is not None  # TRL's, just made
        self._passes.make(self._buffered_inputs)
        return self._planner.next_forwards(self._buffered_inputs, self._step % len(self._buffered_inputs))

    # Loss ---------------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Overrides trl.GRPOTrainer.compute_loss: in training runs forwards one by one, each with its backward."""
        if not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._critic_hooks.begin_micro_step(inputs)
        return self._one_by_one(super().compute_loss, model, inputs, num_items_in_batch)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Overrides trl.GRPOTrainer._compute_loss: a forward's loss times its weight in the step's loss."""
        with self._old_policy.around_loss(inputs) as inputs:
            if WEIGHT in inputs:
                with capture_metrics(self, inputs):
                    loss = super()._compute_loss(model, inputs) * inputs[WEIGHT]
                for part in self._parts:
                    part.after_loss(self, inputs)
            else:  # evaluation, or a micro-batch that stays whole
                loss = super()._compute_loss(model, inputs)
        if not self.model.training:
            self._old_policy.log(self._metrics["eval"])
        return loss

    def record_metric(self, name: str, value: Any, weight: Any = None) -> None:
        """Record `value`, [] of this rank and the running forward, for the metrics of the optimizer step.

        `weight` is its weight in the mean over forwards and ranks; None: sum over forwards, mean over ranks.
        """
        self.counts.samples.append(MetricSample(name, value, weight))

    def _log_step(self) -> None:
        """Log the metrics that the step's forwards recorded, then the metrics of every packing trainer. Collective."""
        values = merge_metrics(self.counts.samples, self.accelerator, self.num_sharing)
        for part in self._parts:
            values = part.step_metrics(values)
        for name, value in values.items():
            self.add_metric(name, value)
        self.counts.samples.clear()
        super()._log_step()

    # Rewards ------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Overrides trl.GRPOTrainer._generate_and_score_completions: checks the rows of a stream; parts choose the
        rows to generate for and the rollouts to train on."""
        for part in self._parts:
            inputs = part.before_generation(self, inputs)
        self._row_checks.look_at_batch(inputs)
        metrics = self.running_metrics
        with swapped(self.args, **self._oversampling.as_sampled), old_names_unsaid(), self._passes.waiting():
            output = super()._generate_and_score_completions(inputs)
            # Repeated once a run, and only with a TRL that nobody tested.
            if not self._old_policy.remove_placeholder(output, metrics):
                output = super()._generate_and_score_completions(inputs)
            self._passes.take(output)
        self.equal_groups.apply(output, metrics, self.logged_advantages, self.accelerator)
        if self._evaluated is not None:
            self._evaluated.end_batch(self.equal_groups.rewards)
        check_images(output, self.step_settings.reader)
        for part in self._parts:
            output = part.after_generation(self, output)
        return output

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """Overrides trl.GRPOTrainer._calculate_rewards: raises an exception of one rank on all ranks; parts add the
        rewards of functions that TRL does not call."""
        if self._evaluated is not None:
            self._evaluated.begin_batch(len(prompts), self.accelerator.process_index)
        rewards = torch.zeros(len(prompts) * self.accelerator.num_processes, 0, device=self.accelerator.device)
        if self._reward_calls.num_called != 0:
            with self._reward_calls.guarding(self):
                rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = within_bounds(rewards, self.reward_weights[: rewards.size(1)], self.reward_func_names)
        self.equal_groups.read(self, rewards)
        if self.model.training:
            self._reward_calls.look_at_first_step(self, rewards)
            totals = total_rewards(rewards, self.reward_weights[: rewards.size(1)])
            for part in self._parts:
                part.rewarded(self, totals)
        for part in self._parts:
            rewards = part.add_rewards(self, prompts, completions, rewards)
        return rewards

    # Resuming -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Overrides trl.GRPOTrainer.get_train_dataloader: as many prompts as are sampled, in each epoch's order."""
        with swapped(self.args, **self._oversampling.as_sampled):
            loader = super().get_train_dataloader()
        rollout_state.let_epochs_through(loader)
        return loader

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> DataLoader:
        """Overrides transformers.Trainer._get_dataloader: loads as many rows as are sampled, in training."""
        if description == "Training":
            batch_size = self._oversampling.rows
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> rollout_state.EpochSampler:
        """Overrides trl.GRPOTrainer._get_train_sampler: a resumed run draws the order of its epoch."""
        return rollout_state.EpochSampler(super()._get_train_sampler(dataset))

    def _save_own_state(self, folder: str) -> None:
        """Save rules, rollouts that are not used up, and a reference that moves."""
        assert self.args.steps_per_generation is not None  # set by TRL's config
        are_waiting = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        rollouts = self._buffered_inputs if are_waiting else None
        rollout_state.save(folder, self.args, self._step, rollouts, self.reward_funcs, self._moving_reference())
        for part in self._parts:
            part.save(self, folder)

    def _moving_reference(self) -> PreTrainedModel | None:
        return self._models()[-1] if self.args.sync_ref_model else None

    def _check_checkpoint(self, folder: str) -> None:
        """Raise ConfigError for a checkpoint that lacks the reference that moves, or the critic."""
        rollout_state.check(folder, self.args)
        self._critic_hooks.check_checkpoint(folder)

    def load_own_weights(self, folder: str) -> None:
        """Overrides trl_ext.WholeCheckpoints.load_own_weights: loads the parts of a critic that the policy lacks."""
        are_loaded = self.is_deepspeed_enabled or (self.is_fsdp_enabled and not is_peft_model(self.model))
        self._critic_hooks.load_weights(folder, are_loaded=are_loaded)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Overrides trl.GRPOTrainer._load_optimizer_and_scheduler: loads rules, rollouts and reference as well."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._planner.restart()
        state = None
        if checkpoint is not None:
            device, reference = self.accelerator.device, self._moving_reference()
            state = rollout_state.load(checkpoint, self.args, device, self.reward_funcs, reference)
            for part in self._parts:
                part.load(self, checkpoint)
        if state is not None:
            self._step, self._buffered_inputs = state  # type: ignore[assignment]  # TRL's None has no annotation
        for part in self._parts:
            part.begin(self, checkpoint, has_rollouts=state is not None)

    # Rehearsal ------------------------------------------------------------------------------------------------------

    def why_not_rehearse(self) -> str:
        """Return the reason, the same on all ranks; empty if there is none."""
        return "rows may hold images, and no size of them is the largest" if self._takes_images else ""

    def largest_micro_batch(self) -> MicroBatch:
        """Return the micro-batch that the rehearsal forwards."""
        batch = rollout_batch(self, longest_prompt_tokens(self, self._tokenize_prompts, MAX_TOKENIZED))
        if len(self._planner.rehearsed(batch.inputs)) > 1:
            batch = replace(batch, what=f"{batch.what} in each of two forwards after a prompt")
        self._planner.restart()
        return self._critic_hooks.with_columns(batch)

    def rehearse(self, batch: MicroBatch) -> None:
        """Run TRL's step on a micro-batch without generation; its metrics are thrown away."""
        with self._critic_hooks.rehearsing(batch):
            TRLGRPOTrainer.training_step(self, self.model_wrapped, self._planner.rehearsed(batch.inputs), None)
            self._planner.restart()

    # Generation, phases and counters --------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Overrides trl.GRPOTrainer._generate: timed, at `eval_temperature` in evaluation, and casts no weights."""
        with self.clock.phase("generate"), ExitStack() as around:
            for part in self._parts:
                around.enter_context(part.generating(self))
            around.enter_context(generating(self, is_packed=self._packs))
            output = super()._generate(prompts)
        if output[6] is not None:  # TRL cannot read None for a row in a batch with images
            output = (*output[:6], [of_row or [] for of_row in output[6]], *output[7:])
        prompt_ids, completion_ids, _, completions, logps, *_ = output
        check_generated(self, prompt_ids, completion_ids, logps)
        if self._takes_images and not can_log_images(self, output[6], self._reward_calls.rows):
            self.log_multimodal = False
            images: Any = self._logs["images"]
            images.clear()
        self._old_policy.skip_next_forward(logps)
        start_scoring(self.reward_funcs, self._reward_calls.rows, prompts, completions, completion_ids, self.state)
        return output

    @property
    def running_metrics(self) -> Any:
        """Return TRL's lists of values by name, which the next log entry of training, or of evaluation, averages."""
        return self._metrics[self.metrics_mode]

    @property
    def logged_advantages(self) -> Any:
        """Return the column of advantages in TRL's table of the last completions, of all ranks."""
        return self._logs["advantages"]

    @property
    def micro_step(self) -> int:
        """Return the number of trained micro-steps."""
        return self._step

    def row_sampler(self) -> rollout_state.EpochSampler:
        """Return a sampler with the order of rows of the running training."""
        with swapped(self.args, **self._oversampling.as_sampled):
            return self._get_train_sampler(self.train_dataset)

    def token_ids(self, prompts: list[Any]) -> list[list[int]]:
        """Return the token ids of prompts, as vLLM gets them."""
        return list(self._tokenize_prompts(prompts)[0])

    def push_again(self) -> None:
        """Let the next generation push the weights to vLLM, whatever weights it has."""
        self._last_loaded_step = -1

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Overrides trl.GRPOTrainer.evaluate: checks the rows, and times a separate phase."""
        self._row_checks.look_at(eval_dataset, "eval_dataset")
        with self.clock.phase("evaluate", whole=True):
            return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """Overrides transformers.Trainer.evaluation_loop: rewards are means over rows, each of which counts once."""
        rows = EvaluatedRows(num_rows_of(dataloader.dataset) * cast(int, self.num_generations_eval))
        with swapped(self, _evaluated=rows, _log_metric=rows):
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        metrics = rows.metrics(self)
        for part in self._parts:
            metrics |= part.evaluation_metrics()
        for name, value in metrics.items():
            self._metrics["eval"][name] = [value]
        return output

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Overrides trl.GRPOTrainer.training_step: timed; ends the metrics of an optimizer step."""
        with self._in_update():
            loss = self._critic_hooks.train(model, super().training_step(model, inputs, num_items_in_batch))
        if self.accelerator.sync_gradients:
            self._planner.restart()
            self._log_step()
            self._old_policy.log(self._metrics["train"])
        # Each process of a group returns the group's loss, of which all processes' mean is logged.
        return loss / self.num_sharing

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides trl.GRPOTrainer.log: leaves out series of rules that have always been 0, and prints completions
        once unless `num_completions_to_print` is set."""
        self._reward_calls.shares.drop_zeros(self.running_metrics, self.metrics_mode)
        super().log(logs, start_time)
        is_first = self.num_completions_to_print is None and self.accelerator.is_main_process
        if self.log_completions and is_first and self._logs["prompt"]:
            self.num_completions_to_print = 0  # TRL prints none, but still writes and uploads them
            where = Path(str(self.args.output_dir)) / "completions"
            print(f"Completions are printed once; each table is in {where}. num_completions_to_print=N prints N.")

    def _keep_completions(self) -> None:
        """Keep a few completions if TRL writes none, nobody else gets the folder, and there will be a report."""
        is_off = self.log_completions or self.args.push_to_hub or os.environ.get(REPORT_VARIABLE) == "0"
        if not is_off and self.model.training and self._logs["prompt"]:
            self._few_completions.keep(Path(str(self.args.output_dir)), self.state.global_step, self._logs)

"""`trl_ext.RewardTrainer`: TRL's RewardTrainer on packed rows, with one copy of the prompt for both sides of a pair.

TRL prepares the data and runs the loop. Ranks may hold different numbers of pairs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.reward_config import RewardConfig as TRLRewardConfig
from trl.trainer.reward_trainer import RewardTrainer as TRLRewardTrainer

from trl_ext.compat.accelerate import global_batches, with_batch_sampler
from trl_ext.compat.peft import base_model
from trl_ext.compat.swap import restored, swapped
from trl_ext.errors import ConfigError, PackingError
from trl_ext.packing.check import CheckResult
from trl_ext.trainers.base.trainer import ExtendedTrainer
from trl_ext.trainers.fit.plan import by_name, settle_memory
from trl_ext.trainers.fit.rehearsal.inputs import MicroBatch, pair_batch
from trl_ext.trainers.forward.checkpointing import keep_layer_options
from trl_ext.trainers.forward.pairs import IN_MICRO_BATCH, SHARED, PairRow
from trl_ext.trainers.forward.pooled_head import add_pooled_head, pooled_scores
from trl_ext.trainers.forward.reward_input import attach_record, training_record
from trl_ext.trainers.reward import data as preference_data
from trl_ext.trainers.reward.config import RewardConfig, for_reward_model, warn_of_new_head
from trl_ext.trainers.reward.data import ANY_NUMBER, PairCollator, PairForward, PairSizes, RowsOfPairs, StepSampler
from trl_ext.trainers.reward.evaluation import EvaluatedPairs, trl_metrics
from trl_ext.trainers.reward.loss import PairStats, combined, evaluation_metrics, pair_losses, pair_stats
from trl_ext.trainers.rows import pairs as pair_rows
from trl_ext.trainers.rows.counted import num_rows_of
from trl_ext.trainers.rows.rendering import check_tokens
from trl_ext.trainers.step.exchange import agreed_num_forwards
from trl_ext.trainers.step.self_check import check_reward_model


class RewardTrainer(ExtendedTrainer, TRLRewardTrainer):
    """Drop-in for `trl.RewardTrainer`, which documents the arguments.

    With a plain `trl.RewardConfig`, packing is on where it is exact. LoRA that would leave a new score head random
    gets the task type SEQ_CLS, so that the head is trained and saved.

    Args:
        rules: A RuleSet that also scores the evaluation pairs. Evaluation then reports the accuracy separately where
            the rules prefer the chosen side and where they do not. A column `rule_gap` in the dataset does the same.

    Metrics, one value per optimizer step:
        packing/forwarded_over_raw: Tokens through the model over real tokens; below 1 where prompts are shared.
        packing/padded_over_forwarded: Tokens of the same batch, padded, over tokens through the model.
        phase/<name>_s: Seconds spent in layout, update and other, on this rank.
    Per evaluation, over all pairs: TRL's metrics, and accuracy_rules_agree, accuracy_rules_disagree, rules_agree_frac,
    score_length_correlation.
    """

    args: TRLRewardConfig
    memory_kind = "reward"

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *rest: Any,
        peft_config: Any = None,
        rules: Any = None,
        **kwargs: Any,
    ):
        args = self._checked(args, RewardConfig, model)
        self._rules = rules
        self.given_rewards = [] if rules is None else [rules]
        self._has_own_collator = data_collator is not None
        self._has_train_dataset = False
        self._evaluated = EvaluatedPairs()
        if getattr(args, "max_tokens_per_forward", None) is not None:
            if self._has_own_collator:
                raise ConfigError("max_tokens_per_forward plans the batches: remove it or the data_collator.")
            if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
                raise ConfigError(
                    "max_tokens_per_forward balances lengths itself. Remove train_sampling_strategy='batch_rebalance'."
                )
        pair_rows.check_columns(train_dataset, "train_dataset")
        pair_rows.check_columns(eval_dataset, "eval_dataset")
        kwargs |= by_name(TRLRewardTrainer.__init__, "eval_dataset", rest)
        if peft_config is not None:
            kwargs["peft_config"] = peft_config
        settle_memory("reward", args, kwargs, model)
        if "peft_config" in kwargs:
            kwargs["peft_config"] = for_reward_model(kwargs["peft_config"], model, args)
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, **kwargs)
        attach_record(base_model(self.model), self._input_record)
        for role, dataset in (("train_dataset", self.train_dataset), ("eval_dataset", self.eval_dataset)):
            check_tokens(dataset, role, ("chosen_ids", "rejected_ids"), self.model.config)
        keep_layer_options(base_model(self.model), args.gradient_checkpointing_kwargs)
        self._padded_collator = self.data_collator
        if is_peft_model(self.model):
            warn_of_new_head(self.model)
        if getattr(args, "packing", True):
            self._start_packing()
        if not self._has_own_collator:
            self._collate_rows()
        if self._max_tokens is not None and isinstance(self.train_dataset, Dataset):
            sizes = self._pair_sizes().tokens
            preference_data.check_budget(self.train_dataset, sizes, self._max_tokens, "train_dataset")
        self._watch_memory("update", "step")

    # Data ---------------------------------------------------------------------------------------------------------

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: PreTrainedTokenizerBase,
        args: TRLRewardConfig,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        """Overrides trl.RewardTrainer._prepare_dataset: checks pairs before, and measures and counts them after."""
        role = f"{dataset_name}_dataset"
        # TRL prepares the training pairs first; an evaluation dataset may also be called "train".
        is_train, self._has_train_dataset = not self._has_train_dataset, True
        # Python numbers, even if the user set a tensor format
        dataset = pair_rows.with_answers_as_messages(dataset.with_format(None))
        pair_rows.check_pairs(dataset, role, processing_class)
        dataset = preference_data.add_row_numbers(pair_rows.without_bad_pairs(dataset, role, processing_class))
        if is_train:
            self._input_record = training_record(dataset, processing_class, args.max_length)
        if self._rules is not None and not is_train:
            dataset = preference_data.add_rule_gaps(dataset, self._rules, role)
        num_pairs = len(dataset) if isinstance(dataset, Dataset) else None
        with pair_rows.refused_by_template(dataset, role, processing_class):
            dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        preference_data.report_dropped(dataset, num_pairs, args.max_length, role)
        preference_data.check_tokens_differ(dataset, role)
        with args.main_process_first(desc=f"measuring {role}"):
            return preference_data.add_shared_tokens(dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Overrides trl.RewardTrainer._set_signature_columns_if_needed: keeps our columns for the collator."""
        super()._set_signature_columns_if_needed()
        own = (SHARED, preference_data.GAP)
        columns: list[str] = self._signature_columns or []
        columns += [name for name in own if name not in columns]

    def get_train_dataloader(self) -> DataLoader:
        """Overrides trl.RewardTrainer.get_train_dataloader: under a token budget, plans rows over all ranks."""
        loader = super().get_train_dataloader()
        if self._max_tokens is None or not isinstance(self.train_dataset, Dataset):
            return loader
        sampler = StepSampler(
            global_batches(loader),
            self._pair_sizes(),
            self.args.gradient_accumulation_steps,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.num_sharing,
            self._max_tokens,
            self.clock,
        )
        return with_batch_sampler(loader, RowsOfPairs(loader.dataset), sampler)

    def _collate_rows(self) -> None:
        """Collate flat rows instead of padded batches."""
        if self.accelerator.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True cuts padded batches into chunks, which flat rows are not. Remove it from "
                "accelerator_config."
            )
        # The default would dispatch a stream.
        self.accelerator.dataloader_config.dispatch_batches = False
        wants_inputs = "inputs" in self.args.include_for_metrics
        self.data_collator = PairCollator(
            self._share_prompt,
            self._pad_token_id,
            self._max_tokens,
            self.clock,
            padded=self._padded_collator if wants_inputs else None,
        )

    def _pair_sizes(self) -> PairSizes:
        rows = self.train_dataset
        assert isinstance(rows, Dataset)  # streams are not planned
        chosen, rejected = (preference_data.lengths(rows, name) for name in ("chosen_ids", "rejected_ids"))
        shared = list(rows[SHARED]) if self._share_prompt else [0] * len(rows)
        return PairSizes(chosen, rejected, shared, self.model.config.get_text_config().hidden_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Overrides trl.RewardTrainer.get_batch_samples: ranks that read a stream agree on the number of forwards;
        processes of a sequence-parallel group get all rows of the group."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        is_planned = self._max_tokens is not None and isinstance(self.train_dataset, Dataset)
        for batch in batches if self.sequence_group is not None and not is_planned else ():
            batch["rows"] = list(chain.from_iterable(self._rows_of_group(batch["rows"])))
        if self._max_tokens is None or not batches:
            return batches, num_items
        counts = torch.tensor([[len(batch["rows"]) for batch in batches]], device=self.accelerator.device)
        for batch, agreed in zip(batches, self.accelerator.gather(counts).amax(dim=0).tolist(), strict=True):
            batch["rows"] = self._filled_up(batch["rows"], agreed)
        return batches, num_items

    def _rows_of_group(self, rows: list[PairRow]) -> list[list[PairRow]]:
        """Return the rows of each process of the sequence-parallel group. Collective in a group."""
        group = self.sequence_group
        if group is None:
            return [rows]
        of_processes = group.gather_object([row.examples for row in rows])
        return [list(map(self._row_of, own)) for own in of_processes]

    def _row_of(self, pairs: Sequence[Mapping[str, Any]]) -> PairRow:
        """Return the row of these pairs on this process's device."""
        return self._collator.row(pairs).to(self.accelerator.device)

    def _filled_up(self, rows: list[PairRow], num_rows: int) -> list[PairRow]:
        """Append empty rows up to `num_rows`, which all ranks forward: forwards are collectives under ZeRO-3."""
        surplus = num_rows - len(rows)
        return rows + [self._row_of([]) for _ in range(surplus)]

    @property
    def _counts_rows(self) -> bool:
        """Whether this process counts the rows that it trains on; only one process of a group does."""
        return self.sequence_group is None or self.sequence_group.rank == 0

    @property
    def _collator(self) -> PairCollator:
        assert isinstance(self.data_collator, PairCollator)  # not called if the user gave a collator
        return self.data_collator

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Overrides transformers.Trainer._save: also writes which input format the model was trained to read."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self._input_record.write(output_dir or str(self.args.output_dir))

    # Packing ------------------------------------------------------------------------------------------------------

    def _why_not_packing(self) -> str:
        if self._has_own_collator:
            return "a data_collator is given, which makes its own batches"
        reason = super()._why_not_packing()
        if reason:
            return reason
        try:
            add_pooled_head(self._models()[0])
        except PackingError as error:
            return str(error)
        return ""

    def _longest_row_tokens(self) -> int | None:
        return self.args.max_length

    def _models(self) -> list[PreTrainedModel]:
        return [base_model(self.accelerator.unwrap_model(self.model))]

    def _self_check(self, model: Any) -> CheckResult:
        return check_reward_model(
            model,
            head=self._models()[0].get_submodule("score"),
            pad_token_id=self._pad_token_id,
            **self.check_options(self.model),
        )

    def _stop_sharing(self, reason: str) -> bool:
        """Overrides PackingSwitch._stop_sharing: rows that the collator has laid out stay as they are."""
        return not isinstance(self.data_collator, PairCollator) and super()._stop_sharing(reason)

    @property
    def _pad_token_id(self) -> int:
        return self.model.config.get_text_config().pad_token_id

    # Loss ---------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Overrides trl.RewardTrainer.training_step: times the step and completes its metrics."""
        with self._in_update():
            loss = super().training_step(model, inputs, num_items_in_batch)
        # One value per micro-batch, as in TRL; under a token budget, which has no micro-batches, one per step.
        if self.counts.samples and (self.accelerator.sync_gradients or self._max_tokens is None):
            self._log_stats(combined(torch.stack(self.counts.samples)))
            self.counts.samples.clear()
        if self.accelerator.sync_gradients:
            self._log_step()
            if self.args.include_num_input_tokens_seen == "no":  # else transformers counts
                self.state.num_input_tokens_seen = self._total_train_tokens
        # Each process of a group returns the group's loss; the mean over all processes is logged.
        return loss / self.num_sharing

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Overrides trl.RewardTrainer.compute_loss: scores flat rows, each with its backward, and sums statistics
        over ranks instead of gathering logits."""
        if "rows" not in inputs:  # the user's collator
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.check_packing(model)
        if return_outputs or not torch.is_grad_enabled():
            return self._loss_of_rows(model, inputs, return_outputs, num_items_in_batch)
        # Under a budget, or without even batches, ranks may hold different numbers of pairs.
        is_even = self._max_tokens is None and self.accelerator.even_batches
        are_equal = is_even or self.accelerator.num_processes == 1
        forwards = [
            PairForward(row, self._collator.row, row.num_pairs if are_equal else ANY_NUMBER, row.num_pairs)
            for row in inputs["rows"]
        ]
        return self._one_by_one(self._loss_of_rows, model, forwards, num_items_in_batch)

    def _loss_of_rows(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any
    ) -> Any:
        """Return the loss over the pairs of these rows, and count their tokens and statistics.

        Args:
            model: The wrapped model.
            inputs: `rows` of pairs, and the number of pairs of the micro-batch if it is divided into forwards.
            return_outputs: Whether to return the outputs, too, as transformers asks.
            num_items_in_batch: As transformers passes it to `compute_loss`.
        """
        rows = [row.to(self.accelerator.device) for row in inputs["rows"]]
        for row in rows if self.model.training and self._counts_rows else ():
            forwarded = row.flat.num_tokens if self._packs else row.num_padded_tokens
            self.counts.add(forwarded, row.num_raw_tokens, row.num_padded_tokens)
        if self._packs:
            loss, outputs = self._packed_loss(model, rows)
        else:
            loss, outputs = self._padded_loss(model, rows, num_items_in_batch)
        assert outputs.logits is not None
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        if self.model.training:
            self.counts.samples.append(pair_stats(chosen, rejected, sum(row.num_raw_tokens for row in rows)))
        else:
            examples = [e for row in rows for e in row.examples]
            center = self.args.center_rewards_coefficient
            loss = self._evaluated.add(self.accelerator, examples, chosen, rejected, center)
        # The loss is a mean over these pairs; weight it to get the mean over the whole micro-batch.
        if IN_MICRO_BATCH in inputs and self._max_tokens is None:
            loss = loss * (sum(row.num_pairs for row in rows) / inputs[IN_MICRO_BATCH])
        return (loss, outputs) if return_outputs else loss

    def _padded_loss(
        self, model: nn.Module, rows: list[PairRow], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, SequenceClassifierOutput]:
        padded = super()._prepare_inputs(self._padded_collator([dict(e) for row in rows for e in row.examples]))
        # Drop the metrics of this single forward; the step's metrics are merged from all forwards.
        with (
            swapped(self, _metrics={"train": defaultdict(list), "eval": defaultdict(list)}),
            restored(self, "_total_train_tokens"),
        ):
            return super().compute_loss(model, padded, True, num_items_in_batch)

    def _packed_loss(self, model: nn.Module, rows: list[PairRow]) -> tuple[torch.Tensor, SequenceClassifierOutput]:
        forwarded, mine = rows, slice(len(rows))
        if not self.model.training:  # in training, get_batch_samples has gathered and agreed
            of_processes = self._rows_of_group(rows)
            forwarded = list(chain.from_iterable(of_processes))
            first = 0 if self.sequence_group is None else sum(map(len, of_processes[: self.sequence_group.rank]))
            mine = slice(first, first + len(rows))
            if self._max_tokens is not None:
                forwarded = self._filled_up(forwarded, agreed_num_forwards(len(forwarded), self.accelerator))
        scores = [pooled_scores(model, row.flat, row.pool_index, self.sequence_group) for row in forwarded]
        scores = [one.view(2, -1) for one in scores[mine]]
        center = self.args.center_rewards_coefficient
        losses = torch.cat([pair_losses(s[0], s[1], row.margins, center) for s, row in zip(scores, rows, strict=True)])
        chosen, rejected = torch.cat(scores, dim=1)
        if self._max_tokens is not None and self.model.training:
            # The means over TRL's micro-batches, on whichever rank and forward their pairs are.
            sizes = [example[IN_MICRO_BATCH] for row in rows for example in row.examples]
            loss = (losses / losses.new_tensor(sizes)).sum()
        else:
            loss = losses.sum() / max(len(losses), 1)  # without pairs 0, in the graph
        return loss, SequenceClassifierOutput(logits=torch.cat([chosen, rejected])[:, None])

    # Rehearsal ------------------------------------------------------------------------------------------------------

    def why_not_rehearse(self) -> str:
        """Return why no rehearsal is possible, the same on all ranks; empty if it is."""
        if self._has_own_collator:
            return "a data_collator is given, whose batches are its own"
        if not isinstance(self.train_dataset, Dataset) and self.args.max_length is None:
            return "train_dataset is a stream and max_length is None, so that no pair is the longest"
        return ""

    def largest_micro_batch(self) -> MicroBatch:
        """Return the batch that the rehearsal forwards."""
        return pair_batch(self, self._pair_sizes().tokens if isinstance(self.train_dataset, Dataset) else None)

    def rehearse(self, batch: MicroBatch) -> None:
        """Take TRL's step on a micro-batch."""
        TRLRewardTrainer.training_step(self, self.model_wrapped, dict(batch.inputs), None)

    # Metrics ------------------------------------------------------------------------------------------------------

    def _log_stats(self, local: torch.Tensor) -> None:
        everywhere = self.accelerator.gather(local[None])[:: self.num_sharing]  # a group holds the same pairs
        stats = PairStats(*combined(everywhere).tolist())
        self._total_train_tokens += int(stats.raw_tokens)
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        for name, value in stats.metrics().items():
            self._metrics["train"][name].append(value)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Overrides trl.RewardTrainer.evaluation_loop: metrics are over all pairs, each of which counts once, and its
        time is a phase."""
        self._evaluated = EvaluatedPairs(num_rows_of(dataloader.dataset))
        with self.clock.phase("evaluate", whole=True):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            pairs = self._evaluated.of_all_ranks()
        self._evaluated = EvaluatedPairs()
        metrics = evaluation_metrics(pairs)
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        if pairs:  # none with the user's collator, for which TRL counts
            found = trl_metrics(pairs) | {"num_tokens": self._total_train_tokens}
            self._metrics["eval"].update({name: [value] for name, value in found.items()})
        return output

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Overrides trl.RewardTrainer._load_optimizer_and_scheduler: `num_tokens` continues its count."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._total_train_tokens = self.state.num_input_tokens_seen

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Overrides trl.RewardTrainer.floating_point_ops: counts the tokens that went through the model."""
        return super().floating_point_ops(self._as_ids(inputs))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Overrides trl.RewardTrainer._track_num_input_tokens: counts the tokens that went through the model."""
        super()._track_num_input_tokens(self._as_ids(inputs))

    def _as_ids(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not inputs.get("rows"):
            return inputs
        ids = torch.cat([row.flat.input_ids for row in inputs["rows"]], dim=1)
        return {str(self.model.main_input_name): ids if self._counts_rows else ids[:, :0]}

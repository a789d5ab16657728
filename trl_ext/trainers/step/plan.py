"""Plan the forwards of an optimizer step: which rollouts go through the policy together, with which loss weight.

TRL updates micro-batch by micro-batch. Here the micro-batches of one optimizer step that were generated together are a
window. `packing/step_plan.py` plans its rows over ranks and forwards: rows of one prompt together, no forward above
the token budget, rows without a gradient left out. Each forward has its own backward.

docs/architecture.md describes a whole step in time order. Legend: B rows, P prompt width, C completion width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import DistributedType
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from trl_ext.errors import refuse_first
from trl_ext.packing.families.images import one_of_each
from trl_ext.packing.prefix_cache import PrefixCache
from trl_ext.packing.step_plan import PrefixGroup, RowSize, StepPlan, plan_step, tokens_of_rows
from trl_ext.trainers.rows.images import GivenImages, by_rows, redistribute_images
from trl_ext.trainers.step.exchange import redistribute
from trl_ext.trainers.step.forward import Forward, PrefixBackward, StepForward
from trl_ext.trainers.step.rows import (
    Rollouts,
    RolloutSize,
    StepRows,
    counted_tokens,
    joined,
    planned,
    sizes_of,
    weights,
)
from trl_ext.trainers.step.sequence_parallel import size_of_groups
from trl_ext.trainers.step.settings import StepSettings, why_rows_stay
from trl_ext.trainers.step.trainer import StepTrainer
from trl_ext.trainers.step.unpadded import whole_images

logger = logging.get_logger(__name__)
_DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NPU)


def check_update(args: Any, why_whole: str, why_zero_advantage_counts: str) -> None:
    """Raise ConfigError for update settings that this loss does not allow.

    Args:
        args: The trainer's config.
        why_whole: Why micro-batches cannot be cut; "" if they can.
        why_zero_advantage_counts: Why a row of zero advantage still has a gradient; "" if it has none.
    """
    max_tokens, size = getattr(args, "max_tokens_per_forward", None), size_of_groups(args)
    why_stays, skips = why_rows_stay(args, why_whole), getattr(args, "skip_zero_advantage", None)
    refuse_first(
        {
            f"max_tokens_per_forward={max_tokens} cannot cut a micro-batch: {why_whole}. Unset it and lower "
            "per_device_train_batch_size instead.": max_tokens is not None and why_whole,
            f"sequence_parallel={size} takes rows out of their micro-batch, which would change the loss: {why_stays}. "
            "Leave one of the two out.": size > 1 and why_stays,
            f"skip_zero_advantage=True would change the gradient: {why_zero_advantage_counts}. Remove it.": (
                skips and why_zero_advantage_counts
            ),
        }
    )


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows that are left out of the update."""

    num_rows: int  # left out, over all ranks
    num_all: int  # all rows, over all ranks
    num_tokens: int  # of the left-out rows over all ranks, prompts included
    not_forwarded: torch.Tensor  # [2] completion tokens of this rank, and its rows


class NumTokens(NamedTuple):
    """Tokens of the rows of an update on one rank."""

    real: int
    padded: int  # of the same rows in padded batches


@dataclass(frozen=True, eq=False)
class StepWindow:
    """Micro-batches of one generation and one optimizer step, planned together."""

    forwards: Sequence[Forward]  # this rank's; the number is equal on every rank
    skipped: SkippedRows | None  # None if no row may be left out
    num_trained: int  # rows with a gradient, over all ranks
    num_tokens: NumTokens  # of this rank's rows


class StepPlanner:
    """Returns the forwards of each micro-step of a GRPO trainer, which need not be set up completely yet."""

    def __init__(self, trainer: StepTrainer):
        self._trainer = trainer
        self._has_warned = False
        self._num_trained: int | None = None  # rows of the step so far; None if no row may be left out
        self._caches: list[PrefixCache] = []
        self._generation: Sequence[Rollouts] = ()
        self._windows: dict[int, StepWindow] = {}  # of the generation, by the index of their first micro-batch
        self.restart()

    @property
    def _settings(self) -> StepSettings:
        settings: StepSettings = self._trainer.step_settings
        return settings

    def restart(self) -> None:
        """Start a new optimizer step; warn once if the last step had no gradient."""
        if self._num_trained == 0 and not self._has_warned and self._trainer.accelerator.is_main_process:
            self._has_warned = True
            logger.warning(
                "No completion of this step has an advantage: in every group all rewards are equal, or completions "
                "were masked. The step has no gradient, which is logged only once; the metric frac_reward_zero_std "
                "counts groups of equal rewards."
            )
        for cache in self._caches:  # of the keys and values of prefixes
            cache.clear()
        self._num_trained = None
        self._done = 0
        self._micro_steps: list[Sequence[Forward]] = []

    def windows(self, micro_batches: Sequence[Rollouts], place: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the ranges of micro-batches, [begin, end), that are planned together, from index `place` on."""
        done, num_steps = self._done, self._trainer.current_gradient_accumulation_steps
        # Several iterations update on the same rows, and need the same windows each time.
        every, num = self._trainer.args.gradient_accumulation_steps, len(micro_batches)
        is_cut = self._trainer.num_iterations > 1 and num % every and every % num
        while place < len(micro_batches):
            left = min(num_steps - done, len(micro_batches) - place)
            size = 1 if is_cut or not self._settings.rows_move else max(left, 1)
            yield place, place + size
            place, done = place + size, (done + size) % num_steps

    def next_forwards(self, micro_batches: Sequence[Rollouts], place: int) -> Sequence[Forward]:
        """Return the forwards of micro-batch number `place`, perhaps none. Collective where a window begins."""
        if not self._micro_steps:
            begin, end = next(self.windows(micro_batches, place))
            window = self.window(micro_batches, begin, end)
            if self._trainer.num_iterations == 1:  # the window is not used again
                del self._windows[begin]
            self.count(window, self._settings.num_passes)
            if window.skipped is not None:
                self._trainer.counts.samples.append(window.skipped)
                self._num_trained = (self._num_trained or 0) + window.num_trained
            # Equal parts, rounded so that the last micro-step, after which the weights may change, is never empty.
            cuts = [len(window.forwards) * k // (end - begin) for k in range(end - begin + 1)]
            self._micro_steps = [window.forwards[a:b] for a, b in pairwise(cuts)]
        self._done += 1
        return self._micro_steps.pop(0)

    def window(self, micro_batches: Sequence[Rollouts], begin: int, end: int) -> StepWindow:
        """Return the plan of micro-batches `begin` to `end`. Collective at the first call for a window."""
        if micro_batches is not self._generation:
            self._generation, self._windows, self._caches = micro_batches, {}, []
        if begin not in self._windows:
            self._windows[begin] = self._planned(micro_batches[begin:end])
        return self._windows[begin]

    def count(self, window: StepWindow, times: int) -> None:
        """Count the padded tokens of `times` passes over a window; forwards count their tokens themselves."""
        self._trainer.counts.add(0, times * window.num_tokens.real, times * window.num_tokens.padded)

    def _planned(self, micro_batches: Sequence[Rollouts]) -> StepWindow:
        settings, accelerator = self._settings, self._trainer.accelerator
        if settings.why_whole:
            return self._whole(micro_batches)
        rollouts = joined(micro_batches if settings.reader is None else list(map(by_rows, micro_batches)))
        if settings.reader is not None:
            rollouts["pixel_values"] = one_of_each(rollouts["pixel_values"])
        sizes = sizes_of(rollouts, accelerator)
        num_rows, per_rank = len(micro_batches[0]["completion_ids"]), len(sizes) // accelerator.num_processes
        first = accelerator.process_index * per_rank
        forwarded, num_trained = self._forward(sizes)
        sizes_in_plan = planned(sizes, settings)
        plan = self._plan(sizes_in_plan, forwarded, num_rows)
        # For every rank; processes that share rows make the same forwards.
        in_group = size_of_groups(self._trainer.args)
        per_process = []
        for rank in range(accelerator.num_processes):
            of_rank = plan.forwards[rank // in_group]
            per_process.append([list(map(forwarded.__getitem__, forward)) for forward in of_rank])
        here, rollouts_here = self._redistribute(rollouts, per_process, per_rank)
        weigh = weights(self._trainer.args.loss_type, num_rows, rollouts)
        rows = StepRows(
            rollouts_here,
            sizes=[sizes[i] for i in here],
            planned=[sizes_in_plan[i] for i in here],
            numbers=here,
            weigh=weigh,
            share_prompt=settings.share_prompt,
            images=self._images(rollouts_here),
        )
        return StepWindow(
            self._forwards(rows, per_process[accelerator.process_index], plan),
            _skipped(rollouts, sizes, forwarded, num_trained, first) if settings.skips else None,
            num_trained,
            _num_tokens(micro_batches, sizes[first : first + per_rank], skips=settings.skips),
        )

    def _whole(self, micro_batches: Sequence[Rollouts]) -> StepWindow:
        """Return a window whose micro-batches are forwarded unchanged."""
        forwards = [self.as_one(batch) for batch in micro_batches]
        sizes = [size for forward in forwards for size in forward.rows.sizes]
        return StepWindow(forwards, None, len(sizes), _num_tokens(micro_batches, sizes, skips=None))

    def _forward(self, sizes: Sequence[RolloutSize]) -> tuple[list[int], int]:
        """Return the rows of all ranks that are forwarded, and how many of these rows have a gradient."""
        skips = self._settings.skips
        forwarded = [i for i, size in enumerate(sizes) if size.counts(skips=skips)]
        if forwarded or not skips:
            return forwarded, len(forwarded)
        # Keep one row, so that metrics such as `entropy` are computed in every step.
        longest = max(range(len(sizes)), key=lambda i: sizes[i].completion_length)
        return [longest] if sizes[longest].completion_length else [], 0

    def _plan(self, rows: Sequence[RowSize], forwarded: Sequence[int], num_rows: int) -> StepPlan:
        """Plan the `forwarded` rows of all ranks; a micro-batch has `num_rows` rows."""
        trainer, settings = self._trainer, self._settings
        num_processes = trainer.accelerator.num_processes
        budget = settings.max_tokens if settings.packs else None
        if budget is None:
            # No forward is larger than the largest packed micro-batch.
            budget = tokens_of_rows(rows, num_rows)
        return plan_step(
            [rows[i] for i in forwarded],
            num_processes // size_of_groups(trainer.args),
            max(budget >> trainer.forward_loop.halving.level["actor"], 1),
            trainer.model.config.get_text_config().hidden_size,
            None if settings.rows_move else [i // (len(rows) // num_processes) for i in forwarded],
            settings.caches_prefixes,
            gathers=is_deepspeed_zero3_enabled(),
        )

    def _redistribute(
        self, rollouts: Rollouts, per_process: Sequence[Sequence[Sequence[int]]], per_rank: int
    ) -> tuple[Sequence[int], Rollouts]:
        """Return the numbers of the rows that this rank forwards, and these rows. Collective."""
        accelerator, in_group = self._trainer.accelerator, size_of_groups(self._trainer.args)
        rank = accelerator.process_index
        if not self._settings.rows_move or accelerator.num_processes == 1:
            return range(rank * per_rank, (rank + 1) * per_rank), rollouts
        of_ranks = [sorted(chain.from_iterable(forwards)) for forwards in per_process]
        # Add a row at the end for the filler; all processes that share rows need the same row.
        wanted = [[*rows, r // in_group * in_group * per_rank] for r, rows in enumerate(of_ranks)]
        here = redistribute({k: v for k, v in rollouts.items() if k != "pixel_values"}, wanted, accelerator)
        if self._settings.reader is not None:
            here["pixel_values"] = redistribute_images(rollouts["pixel_values"], wanted, accelerator)
        return of_ranks[rank], here

    def _images(self, rollouts: Rollouts) -> GivenImages | None:
        """Return the images of rows if the model reads images. Collective in that case."""
        num_rows = len(rollouts["completion_ids"])
        return GivenImages.of(rollouts, num_rows, self._settings.reader, self._trainer.accelerator)

    def _forwards(self, rows: StepRows, mine: Sequence[Sequence[int]], plan: StepPlan) -> list[Forward]:
        """Return this rank's forwards, and after each prefix group the backward of its cached prefix."""
        place = {number: i for i, number in enumerate(rows.numbers)}
        level = self._trainer.forward_loop.halving.level["actor"]
        forwards = []
        for k, members in enumerate(mine):
            forwards.append(StepForward(rows, tuple(place[i] for i in members), plan.largest(k), level))
        found: list[Forward] = []
        end = 0
        for group in plan.prefix_groups:
            cache = self._new_cache(rows, forwards[group.begin : group.end], group)
            found += [replace(forward, cache=cache) for forward in forwards[group.begin : group.end]]
            found.append(PrefixBackward(cache))
            end = group.end
        found += forwards[end:]
        if isinstance(found[-1], PrefixBackward) and self._trainer.accelerator.distributed_type in _DDP:
            found.append(StepForward(rows, (), 0, level))  # DDP reduces gradients in the backward of its last forward
        return found

    def _new_cache(self, rows: StepRows, forwards: Sequence[StepForward], group: PrefixGroup) -> PrefixCache:
        """Return a cache for the common prefix of these forwards' rows; its length is 0 if they have none here."""
        accelerator, in_group = self._trainer.accelerator, size_of_groups(self._trainer.args)
        length = 0
        if group.groups[accelerator.process_index // in_group] is not None:
            members = [i for forward in forwards for i in forward.members]
            sequences, shared = rows.unpadded.sequences, rows.planned[members[0]].shared
            shared -= shared % in_group  # processes that share rows have equal parts of the prefix
            length = whole_images(sequences[members[0]], shared)
            first = sequences[members[0]][:length]
            if not all(np.array_equal(sequences[i][:length], first) for i in members):
                length = 0  # two prompts with the same hash
        self._caches.append(PrefixCache(length))
        return self._caches[-1]

    def as_one(self, micro_batch: Rollouts) -> StepForward:
        """Return a micro-batch as a single forward, without a plan."""
        settings, sizes = self._settings, sizes_of(micro_batch)
        weigh = weights(self._trainer.args.loss_type, len(sizes), micro_batch)
        keep_all, numbers = self._trainer.aux_loss_enabled, range(len(sizes))
        share = settings.share_prompt and not keep_all
        in_plan = planned(sizes, settings)
        rows = StepRows(
            micro_batch,
            sizes=sizes,
            planned=in_plan,
            numbers=numbers,
            weigh=weigh,
            share_prompt=share,
            keep_all=keep_all,
            images=self._images(micro_batch),
        )
        is_whole = bool(settings.why_whole)
        return StepForward(rows, tuple(numbers), 1 if is_whole else len(sizes), is_whole=is_whole)

    def rehearsed(self, micro_batch: Rollouts) -> Sequence[Forward]:
        """Return the forwards of a rehearsal: the micro-batch as a single forward.

        If a group takes several forwards after its cached prompt, the forward comes twice, with the prefix's backward.
        """
        one, settings = self.as_one(micro_batch), self._settings
        if not settings.caches_prefixes or settings.reader is not None or settings.why_whole:
            return [one]
        group, shared = {row.group for row in one.rows.planned}, one.rows.planned[0].shared
        if len(group) > 1 or (self._trainer.num_generations or 1) <= one.num_rows or not shared:
            return [one]
        cache = PrefixCache(shared - shared % size_of_groups(self._trainer.args))
        self._caches.append(cache)
        behind = replace(one, cache=cache)
        return [behind, behind, PrefixBackward(cache), replace(one, members=(), most_rows=0)]


def _skipped(
    rollouts: Rollouts, sizes: Sequence[RolloutSize], forwarded: Sequence[int], num_trained: int, first: int
) -> SkippedRows:
    """Return the rows that are left out.

    Args:
        rollouts: The rows of this rank.
        sizes: Of the rows of all ranks.
        forwarded: Numbers of the rows of all ranks that are forwarded.
        num_trained: How many of these have a gradient.
        first: The number of this rank's first row.
    """
    tokens = counted_tokens(rollouts).sum(dim=1)
    here = [i - first for i in forwarded if 0 <= i - first < len(tokens)]
    trained = forwarded if num_trained else ()
    num_tokens = sum(size.length for size in sizes) - sum(sizes[i].length for i in trained)
    rows = tokens.new_tensor(len(tokens) - len(here))
    not_forwarded = torch.stack([tokens.sum() - tokens[here].sum(), rows])
    return SkippedRows(len(sizes) - len(trained), len(sizes), num_tokens, not_forwarded)


def _num_tokens(micro_batches: Sequence[Rollouts], sizes: Sequence[RolloutSize], *, skips: bool | None) -> NumTokens:
    """Return the tokens of the rows of the update.

    `sizes` has every row of this rank. `skips`: whether rows without a gradient are left out; None if no row may be.
    """
    raw = padded = 0
    begin = 0
    for batch in micro_batches:
        width = batch["prompt_mask"].size(1) + batch["completion_mask"].size(1)
        end = begin + len(batch["completion_ids"])
        rows = [size for size in sizes[begin:end] if skips is None or size.counts(skips=skips)]
        raw, padded, begin = raw + sum(size.length for size in rows), padded + width * len(rows), end
    return NumTokens(raw, padded)

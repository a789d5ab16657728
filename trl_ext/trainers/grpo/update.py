"""The forwards of an optimizer step: which rollouts go through the policy together, and with which weight in the loss.

TRL updates micro-batch by micro-batch. Here all micro-batches of one optimizer step that were generated together make
a window, whose rows are planned over ranks and forwards (`packing/step_plan.py`): group mates side by side, no more
tokens in a forward than the budget, rows without a gradient left out. Each forward has its own backward.

docs/architecture.md walks through a whole step in time order. Legend: B rows, P prompt width, C completion width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from trl_ext.errors import ConfigError
from trl_ext.packing.families.images import one_of_each
from trl_ext.packing.kept import KeptKeys
from trl_ext.packing.step_plan import RowSize, StepPlan, halves, num_tokens, plan_step, tokens_of_rows
from trl_ext.packing.trie import find_forks
from trl_ext.trainers.forward.completions import shareable
from trl_ext.trainers.forward.exchange import deal
from trl_ext.trainers.forward.sequence_parallel import size_of_groups
from trl_ext.trainers.forward.step import MEAN_OVER_ROWS, SUM_OVER_TOKENS, StepSettings, why_rows_stay
from trl_ext.trainers.rows.images import GivenImages, by_rows, deal_images, digest_of_rows

logger = logging.get_logger(__name__)
Rollouts = dict[str, Any]
# The weight of the loss of some rows, by their number and their batch.
Weigh = Callable[[int, Rollouts], Any]
# The entry of a forward's batch that its loss is multiplied with, so that the forwards' losses add up to TRL's.
WEIGHT = "loss_weight"


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """A row of rollouts, in tokens.

    Args:
        prompt: A number that stands for the prompt's tokens, equal on all ranks.
        prompt_length, completion_length: Tokens; 0 for a completion that is masked because it was cut off.
        has_gradient: False for a row whose advantage is 0.
    """

    prompt: int
    prompt_length: int
    completion_length: int
    has_gradient: bool

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length


def sizes_of(rollouts: Rollouts, accelerator: Any = None) -> list[RolloutSize]:
    """Return the size of every row; with an accelerator of the rows of all ranks, rank after rank. Collective then."""
    ids, mask = rollouts["prompt_ids"], rollouts["prompt_mask"]
    # Two prompts with one number would share a forward in vain, no more: the layout compares tokens. The powers count
    # from the right, where prompts end whatever their padding.
    powers = torch.full_like(ids[:1], 0x5851F42D4C957F2D).cumprod(dim=1).flip(1)
    advantages = rollouts["advantages"]
    has_gradient = advantages != 0 if advantages.ndim == 1 else (advantages != 0).any(dim=1)
    facts = ((ids + 1) * mask * powers).sum(dim=1), mask.sum(dim=1), rollouts["completion_mask"].sum(dim=1)
    if isinstance(images := rollouts.get("pixel_values"), list):  # prompts of one text may show others
        facts = facts[0] + digest_of_rows(images, ids.device), *facts[1:]
    rows = torch.stack([*facts, has_gradient.long()], dim=1)  # [B, 4]
    rows = rows if accelerator is None else accelerator.gather(rows)
    return [RolloutSize(prompt, p, c, bool(gradient)) for prompt, p, c, gradient in rows.tolist()]


def tokens_of(rollouts: Rollouts, settings: StepSettings, accelerator: Any) -> list[np.ndarray]:
    """Return the tokens of every row of all ranks, rank after rank: four bytes each cross the ranks. Collective.

    An image's tokens are a number below zero, which rows with other images do not have.
    """
    ids, mask = (
        torch.cat([rollouts[f"{part}_{name}"] for part in ("prompt", "completion")], 1) for name in ("ids", "mask")
    )
    marked = ids.masked_fill(mask == 0, -1)
    if settings.reader is not None:
        digests = digest_of_rows(rollouts["pixel_values"], ids.device)[:, None] % 2**30
        marked = torch.where(marked == settings.reader.token_id, -2 - digests, marked)
    padded = accelerator.pad_across_processes(marked.to(torch.int32), dim=1, pad_index=-1)
    return [row[row != -1].astype(np.int64) for row in accelerator.gather(padded).cpu().numpy()]


@dataclass(frozen=True, eq=False)
class RolloutWindow:
    """Rollouts of this rank that are updated on within one optimizer step.

    Args:
        rollouts: After rows have changed ranks; there may be more behind those that are updated on.
        sizes: Of every row of `rollouts`.
        numbers: The number of every row, counted over the rows of all ranks, rank after rank.
        planned: The same, as the plan sees them.
        weigh: Tells the weight of the loss of some of the rows.
        filler: One row that counts for nothing: what a rank forwards while others have one forward more.
    """

    rollouts: Rollouts
    sizes: Sequence[RolloutSize]
    numbers: Sequence[int]
    planned: Sequence[RowSize]
    weigh: Weigh
    filler: Rollouts

    def batch(self, rows: Sequence[int]) -> Rollouts:
        """Return some of the rows, in the columns that they need."""
        if not rows:
            return {**self.filler, WEIGHT: 0.0}
        of_prompts = max(self.sizes[i].prompt_length for i in rows)
        of_completions = max(max(self.sizes[i].completion_length for i in rows), 1)
        width, prompt_width = (self.rollouts[f"{part}_ids"].size(1) for part in ("completion", "prompt"))
        index = torch.tensor(rows, device=self.rollouts["prompt_ids"].device)

        def pick(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return [value[i] for i in rows] if isinstance(value, list | tuple) else value
            if value.ndim == 0:
                return value
            value = value.index_select(0, index)
            if name.startswith("prompt_"):
                return value[:, prompt_width - of_prompts :]
            return value[:, :of_completions] if value.ndim == 2 and value.size(1) == width else value

        batch = {name: pick(name, value) for name, value in self.rollouts.items()}
        return {**batch, WEIGHT: self.weigh(len(rows), batch)}


@dataclass(frozen=True, eq=False)
class RolloutForward:
    """Rows of a window that go through the policy together; `trl_ext.trainers.fit.oom.rescue.Forward`.

    Args:
        window: Where they are from.
        rows: Their numbers in it; none: a forward that counts for nothing.
        most_rows: At least the number of rows of any rank's forward at this place.
        level: How often the budget was halved when it was planned, and it since.
        kept: The prefix that it is behind, and other forwards with it; None for one that stands alone.
        is_last: Whether it is the last of these.
    """

    window: RolloutWindow
    rows: tuple[int, ...]
    most_rows: int
    level: int = 0
    kept: KeptKeys | None = None
    is_last: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.window.planned[i] for i in self.rows)

    def halves(self) -> "list[RolloutForward]":
        if self.most_rows < 2:
            return [replace(self, level=self.level + 1)]
        parts = halves(self.window.planned, self.rows) if self.rows else ((), ())
        smaller = replace(self, most_rows=self.most_rows - 1, level=self.level + 1)
        return [replace(smaller, rows=parts[0], is_last=False), replace(smaller, rows=parts[1])]

    def batch(self) -> Rollouts:
        if self.kept is not None:
            self.kept.is_last = self.is_last
        return self.window.batch(self.rows)


@dataclass(frozen=True, eq=False)
class WholeForward:
    """A micro-batch whose loss is no sum over its rows, and which therefore stays what TRL made it."""

    rollouts: Rollouts
    level: int = 0
    most_rows: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.rollouts["completion_ids"])

    @property
    def num_tokens(self) -> int:
        # On the host: there may be no memory left on the card for a sum.
        return int(self.rollouts["prompt_mask"].cpu().sum() + self.rollouts["completion_mask"].cpu().sum())

    def halves(self) -> "list[WholeForward]":
        return [self]

    def batch(self) -> Rollouts:
        return self.rollouts


def check_update(args: Any, why_whole: str, why_zero_advantage_counts: str) -> None:
    """Raise ConfigError for settings of the update that this loss does not allow.

    Args:
        args: The trainer's config.
        why_whole: Why micro-batches are not cut; "" if they are.
        why_zero_advantage_counts: Why a row of zero advantage has a gradient all the same; "" if it has none.
    """
    max_tokens, size = getattr(args, "max_tokens_per_forward", None), size_of_groups(args)
    if max_tokens is not None and why_whole:
        raise ConfigError(
            f"max_tokens_per_forward={max_tokens} cannot cut a micro-batch: {why_whole}. Unset it and lower "
            "per_device_train_batch_size instead."
        )
    if size > 1 and (why := why_rows_stay(args, why_whole)):
        raise ConfigError(
            f"sequence_parallel={size} takes rows out of their micro-batch, which would change the loss: {why}. "
            "Leave one of the two out."
        )
    if getattr(args, "skip_zero_advantage", None) and why_zero_advantage_counts:
        raise ConfigError(
            f"skip_zero_advantage=True would change the gradient: {why_zero_advantage_counts}. Remove it."
        )


class StepUpdate:
    """Hands out the forwards of each micro-step of an optimizer step.

    Args:
        trainer: A GRPO trainer; not ready yet.

    Attributes:
        vision_runs_everywhere: Whether the forwards that were planned last call the vision tower also where their
            rows show no image.
    """

    vision_runs_everywhere = False

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._has_warned = False
        self._kept: list[KeptKeys] = []
        self._num_kept: int | None = None  # rows of the step so far; None where none may be left out
        self.restart()

    @property
    def _settings(self) -> StepSettings:
        settings: StepSettings = self._trainer.step_settings
        return settings

    def restart(self) -> None:
        """The next micro-step is the first of an optimizer step; say once that the last had nothing to learn from."""
        if self._num_kept == 0 and not self._has_warned and self._trainer.accelerator.is_main_process:
            self._has_warned = True
            logger.warning(
                "No completion of this step has an advantage: in every group all rewards are equal, or completions "
                "were masked. The step has no gradient, which is logged only once; the metric frac_reward_zero_std "
                "counts groups of equal rewards."
            )
        self.forget_kept()
        self._num_kept = None
        self._done = 0
        self._micro_steps: list[Sequence[Any]] = []

    def forget_kept(self) -> None:
        """Let go of the keys of prompts that were kept for several forwards."""
        for keys in self._kept:
            keys.forget()
        self._kept.clear()

    def windows(self, micro_batches: Sequence[Rollouts], place: int = 0) -> Iterator[Sequence[Rollouts]]:
        """Yield the micro-batches from a place on, those together that are updated on together.

        Args:
            micro_batches: Of the generation.
            place: The number of the next of them.
        """
        done, num_steps = self._done, self._trainer.current_gradient_accumulation_steps
        # Several iterations come back to the rows, and have to meet them in the same windows.
        every, num = self._trainer.args.gradient_accumulation_steps, len(micro_batches)
        is_cut = self._trainer.num_iterations > 1 and num % every and every % num
        while place < len(micro_batches):
            left = min(num_steps - done, len(micro_batches) - place)
            size = 1 if is_cut or not self._settings.rows_move else max(left, 1)
            yield micro_batches[place : place + size]
            place, done = place + size, (done + size) % num_steps

    def next_forwards(self, micro_batches: Sequence[Rollouts], place: int) -> Sequence[Any]:
        """Return the forwards of the next micro-step, perhaps none; a window begins where the last one ends.
        Collective at such a beginning.

        Args:
            micro_batches: Of the generation.
            place: The number of the next of them.
        """
        if not self._micro_steps:
            window = next(self.windows(micro_batches, place))
            self.count(window, self._settings.num_passes)
            forwards = self.planned(window)
            # Even, and rounded so that the last micro-step, after which the weights may change, is never empty.
            cuts = [len(forwards) * k // len(window) for k in range(len(window) + 1)]
            self._micro_steps = [forwards[a:b] for a, b in pairwise(cuts)]
        self._done += 1
        return self._micro_steps.pop(0)

    def planned(self, micro_batches: Sequence[Rollouts], *, is_noted: bool = True) -> Sequence[Any]:
        """Return the forwards for some micro-batches of one optimizer step. Collective.

        Args:
            micro_batches: A window.
            is_noted: Note the rows that are left out; False where the same is planned again for the update.
        """
        settings = self._settings
        trainer, accelerator = self._trainer, self._trainer.accelerator
        rollouts = _joined(micro_batches if settings.reader is None else list(map(by_rows, micro_batches)))
        if settings.reader is not None:
            rollouts["pixel_values"] = one_of_each(rollouts["pixel_values"])
            given = GivenImages(rollouts["pixel_values"], settings.reader)
            self.vision_runs_everywhere = given.of_all(accelerator).runs_everywhere
        if settings.why_whole:
            return [WholeForward(batch) for batch in micro_batches]
        sizes = sizes_of(rollouts, accelerator)
        num_rows = len(micro_batches[0]["completion_ids"])
        kept = _kept(sizes, settings)
        has_gradient = bool(kept)
        if settings.skips and not kept:
            # One row all the same, so that `entropy` and the like are computed in every step.
            longest = max(range(len(sizes)), key=lambda i: sizes[i].completion_length)
            kept = [longest] if sizes[longest].completion_length else []
        if settings.skips and is_noted:
            self._tell(rollouts, sizes, kept, has_gradient)
        rows = _as_planned(sizes, settings)
        if settings.packs and settings.share_prompt:
            rows = find_forks(rows, [shareable(tokens) for tokens in tokens_of(rollouts, settings, accelerator)])
        per_rank, in_group = len(sizes) // accelerator.num_processes, size_of_groups(trainer.args)
        plan = self._plan(rows, kept, num_rows, settings)
        rank = accelerator.process_index
        # Of each rank; processes that share rows make the same forwards.
        forwards = [plan.forwards[rank // in_group] for rank in range(accelerator.num_processes)]
        mine = [[kept[i] for i in forward] for forward in forwards[rank]]
        if settings.rows_move and accelerator.num_processes > 1:
            of_ranks = [sorted(kept[i] for forward in own for i in forward) for own in forwards]
            here: Sequence[int] = of_ranks[rank]
            # Behind them a row for the filler, of which all processes that share rows need the same.
            of_filler = [rank // in_group * in_group * per_rank for rank in range(accelerator.num_processes)]
            dealt = [[*o, f] for o, f in zip(of_ranks, of_filler, strict=True)]
            rest = {name: value for name, value in rollouts.items() if name != "pixel_values"}
            rollouts_here = deal(rest, dealt, accelerator)
            if settings.reader is not None:
                rollouts_here["pixel_values"] = deal_images(rollouts["pixel_values"], dealt, accelerator)
        else:
            here = range(rank * per_rank, (rank + 1) * per_rank)
            rollouts_here = rollouts
        place = {number: i for i, number in enumerate(here)}
        weigh, filler = _weights(trainer.args.loss_type, num_rows, rollouts), _filler(rollouts_here)
        sizes_here, rows_here = [sizes[i] for i in here], [rows[i] for i in here]
        window = RolloutWindow(rollouts_here, sizes_here, here, rows_here, weigh, filler)
        planned = [
            RolloutForward(window, tuple(place[i] for i in forward), plan.largest(k), trainer.rescue.level)
            for k, forward in enumerate(mine)
        ]
        for stretch in plan.stretches:
            group = stretch.groups[rank // in_group]
            shared = next((rows[i].shared for i in kept if rows[i].group == group), 0)
            keys = KeptKeys(shared - shared % in_group)  # processes that share rows have equal parts of it
            for k in range(stretch.begin, stretch.end):
                planned[k] = replace(planned[k], kept=keys, is_last=k == stretch.end - 1)
            self._kept.append(keys)
        return planned

    def as_one(self, micro_batch: Rollouts) -> Any:
        """Return a micro-batch as one forward, without a plan."""
        settings = self._settings
        if settings.why_whole:
            return WholeForward(micro_batch)
        sizes = sizes_of(micro_batch)
        weigh = _weights(self._trainer.args.loss_type, len(sizes), micro_batch)
        numbers, rows = range(len(sizes)), _as_planned(sizes, settings)
        window = RolloutWindow(micro_batch, sizes, numbers, rows, weigh, _filler(micro_batch))
        return RolloutForward(window, tuple(range(len(sizes))), len(sizes))

    def rehearsed(self, micro_batch: Rollouts) -> Sequence[Any]:
        """Return the forwards of a rehearsal: the micro-batch as one, twice where a group takes several forwards
        behind its prompt, which is kept."""
        one, settings = self.as_one(micro_batch), self._settings
        if not settings.keeps or settings.reader is not None or settings.why_whole:
            return [one]
        group, shared = {row.group for row in one.window.planned}, one.window.planned[0].shared
        if len(group) > 1 or self._trainer.num_generations <= one.num_rows or not shared:
            return [one]
        self._kept.append(KeptKeys(shared - shared % size_of_groups(self._trainer.args)))
        return [replace(one, kept=self._kept[-1], is_last=is_last) for is_last in (False, True)]

    def _plan(self, rows: Sequence[RowSize], kept: Sequence[int], num_rows: int, settings: StepSettings) -> StepPlan:
        """Return the plan of some of the rows of all ranks, `num_rows` of which make a micro-batch."""
        trainer, num_processes = self._trainer, self._trainer.accelerator.num_processes
        budget = settings.max_tokens if settings.packs else None
        if budget is None:
            # No forward is larger than the largest of TRL's own, packed with group mates side by side.
            budget = tokens_of_rows(rows, num_rows)
        return plan_step(
            [rows[i] for i in kept],
            num_processes // size_of_groups(trainer.args),
            max(budget >> trainer.rescue.level, 1),
            trainer.model.config.get_text_config().hidden_size,
            None if settings.rows_move else [i // (len(rows) // num_processes) for i in kept],
            settings.keeps,
            gathers=is_deepspeed_zero3_enabled(),
        )

    def count(self, micro_batches: Sequence[Rollouts], times: int) -> None:
        """Count what the rows that are forwarded, so many times, would take as padded batches; forwards count
        themselves."""
        settings = self._settings
        for batch in micro_batches:
            width = sum(batch[mask].size(1) for mask in ("prompt_mask", "completion_mask"))
            sizes = sizes_of(batch)
            kept = [sizes[i].length for i in _kept(sizes, settings)]
            self._trainer.counts.add(0, times * sum(kept), times * width * len(kept))

    def _tell(self, rollouts: Rollouts, sizes: Sequence[RolloutSize], kept: Sequence[int], has_gradient: bool) -> None:
        """Note which share of the rows is left out, and how many have a gradient."""
        tokens = counted_tokens(rollouts).sum(dim=1)
        first = self._trainer.accelerator.process_index * len(tokens)
        here = [i - first for i in kept if 0 <= i - first < len(tokens)]
        counted = kept if has_gradient else ()
        num_tokens = sum(one.length for one in sizes) - sum(sizes[i].length for i in counted)
        self._trainer.counts.notes.append(
            SkippedRows(len(sizes) - len(counted), len(sizes), num_tokens, tokens.sum() - tokens[here].sum())
        )
        self._num_kept = (self._num_kept or 0) + len(counted)


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows that left the update.

    Args:
        num_rows, num_all: Over all ranks.
        num_tokens: Of those rows, prompts included, over all ranks.
        tokens: [] tokens of this rank's completions that were not forwarded.
    """

    num_rows: int
    num_all: int
    num_tokens: int
    tokens: torch.Tensor


def counted_tokens(rollouts: Mapping[str, Any]) -> torch.Tensor:
    """[B, C] 1 for the tokens that losses and statistics count: sampled by the policy, in a scored completion."""
    return rollouts["completion_mask"] * rollouts.get("tool_mask", 1)


def _kept(sizes: Sequence[RolloutSize], settings: StepSettings) -> list[int]:
    """Return the numbers of the rows that the update learns from."""
    if settings.why_whole:
        return list(range(len(sizes)))
    return [i for i, one in enumerate(sizes) if one.completion_length and (one.has_gradient or not settings.skips)]


def _as_planned(sizes: Sequence[RolloutSize], settings: StepSettings) -> list[RowSize]:
    if not settings.packs:  # padded rows are as long as their batch is wide
        return [RowSize(i, 0, max(one.length for one in sizes)) for i in range(len(sizes))]
    rows = []
    for i, row in enumerate(sizes):
        # The last prompt token stays with each completion: it is the one that predicts the first completion token.
        shared = max(row.prompt_length - 1, 0) if settings.share_prompt else 0
        rows.append(RowSize(row.prompt if settings.share_prompt else i, shared, row.length - shared))
    return rows


def _joined(micro_batches: Sequence[Rollouts]) -> Rollouts:
    """Return the rows of all micro-batches, which are parts of one batch."""
    first = micro_batches[0]
    if len(micro_batches) == 1:
        return first

    def join(name: str) -> Any:
        values = [batch[name] for batch in micro_batches]
        if isinstance(values[0], torch.Tensor):
            return values[0] if values[0].ndim == 0 else torch.cat(values)
        return [one for value in values for one in value] if isinstance(values[0], list | tuple) else values[0]

    return {name: join(name) for name in first}


def _filler(rollouts: Rollouts) -> Rollouts:
    """Return the last row with all numbers 0, so that nothing of it reaches a loss."""

    def empty(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value[-1:] if isinstance(value, list | tuple) else value
        if value.ndim == 0 or name in ("prompt_ids", "prompt_mask"):
            return value[-1:] if value.ndim else value
        return torch.zeros_like(value[-1:])

    return {name: empty(name, value) for name, value in rollouts.items()}


def _weights(loss_type: str, num_rows: int, micro_batch: Rollouts) -> Weigh:
    """Return how rows weigh that are some of those of micro-batches of `num_rows` rows."""
    if loss_type in SUM_OVER_TOKENS:
        return lambda rows, batch: 1.0
    if loss_type in MEAN_OVER_ROWS:
        return lambda rows, batch: rows / num_rows
    whole = counted_tokens(micro_batch).sum().clamp(min=1.0)
    return lambda rows, batch: counted_tokens(batch).sum() / whole

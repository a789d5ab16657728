"""Rows that a rank forwards in one optimizer step: TRL's columns on the device, their tokens on the host.

Legend: B rows, P prompt width, C completion width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from trl_ext.packing.step_plan import RowSize
from trl_ext.trainers.rows.images import GivenImages, digest_of_rows, whole_rows
from trl_ext.trainers.step.settings import MEAN_OVER_ROWS, SUM_OVER_TOKENS, StepSettings
from trl_ext.trainers.step.unpadded import Unpadded, unpad

Rollouts = dict[str, Any]
# Returns the loss weight of some rows, from their number and their batch.
Weigh = Callable[[int, Rollouts], Any]
# A forward's loss is multiplied by this entry of its batch, so that the losses of all forwards add up to TRL's.
WEIGHT = "loss_weight"


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """The size of a rollout, in tokens."""

    prompt: int  # hash of the prompt's tokens, equal on all ranks
    prompt_length: int
    completion_length: int  # 0 for a completion that is masked because it was cut off
    has_gradient: bool  # False for a row whose advantage is 0

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length

    def counts(self, *, skips: bool) -> bool:
        """Return whether an update forwards the row; `skips`: rows without a gradient are left out."""
        return self.completion_length > 0 and (self.has_gradient or not skips)


def sizes_of(rollouts: Rollouts, accelerator: Any = None) -> list[RolloutSize]:
    """Return the size of every row; with an accelerator, of the rows of all ranks in rank order. Collective then."""
    ids, mask = rollouts["prompt_ids"], rollouts["prompt_mask"]
    # A hash collision costs speed only: the prompts are planned together and share nothing, as layouts compare tokens.
    # Powers count from the right, where prompts end whatever their padding.
    powers = torch.full_like(ids[:1], 0x5851F42D4C957F2D).cumprod(dim=1).flip(1)
    advantages = rollouts["advantages"]
    has_gradient = advantages != 0 if advantages.ndim == 1 else (advantages != 0).any(dim=1)
    facts = ((ids + 1) * mask * powers).sum(dim=1), mask.sum(dim=1), rollouts["completion_mask"].sum(dim=1)
    if isinstance(images := rollouts.get("pixel_values"), list):  # prompts of equal text may have different images
        facts = facts[0] + digest_of_rows(images, ids.device), *facts[1:]
    rows = torch.stack([*facts, has_gradient.long()], dim=1)  # [B, 4]
    rows = rows if accelerator is None else accelerator.gather(rows)
    return [RolloutSize(prompt, p, c, bool(gradient)) for prompt, p, c, gradient in rows.tolist()]


def planned(sizes: Sequence[RolloutSize], settings: StepSettings) -> list[RowSize]:
    """Return the sizes that the step's plan uses."""
    if not settings.packs:  # padded rows are as long as their batch is wide
        longest = max((size.length for size in sizes), default=0)
        return [RowSize(i, 0, longest) for i in range(len(sizes))]
    if not settings.share_prompt:
        return [RowSize(i, 0, size.length) for i, size in enumerate(sizes)]
    # The last prompt token stays with each completion: it predicts the first completion token.
    shared = [max(size.prompt_length - 1, 0) for size in sizes]
    return [RowSize(size.prompt, s, size.length - s) for size, s in zip(sizes, shared, strict=True)]


@dataclass(frozen=True, eq=False)
class StepRows:
    """Rollouts that this rank updates on in one optimizer step.

    Args:
        rollouts: Rows after the exchange between ranks. The last row may be there for the filler only.
        sizes: Sizes of the rows of the update.
        planned: The same sizes as the plan uses them.
        numbers: The rows' numbers among the rows of all ranks, in rank order.
        weigh: Returns the loss weight of some of the rows.
        share_prompt: Whether rows with a common beginning share one copy of it.
        keep_all: Whether rows without a scored token are forwarded too, for an auxiliary loss.
        images: Images of all rows; None if the model takes none.
    """

    rollouts: Rollouts
    sizes: Sequence[RolloutSize]
    planned: Sequence[RowSize]
    numbers: Sequence[int]
    weigh: Weigh
    share_prompt: bool
    keep_all: bool = False
    images: GivenImages | None = None

    @cached_property
    def unpadded(self) -> Unpadded:
        """Tokens of all rows on the host, copied once when the first forward is laid out."""
        return unpad(*whole_rows(self.rollouts), self.rollouts["completion_ids"].size(1)).with_images(self.images)

    def width(self, rows: Sequence[int]) -> int:
        """Return the completion width that some rows need."""
        return max([1, *(self.sizes[i].completion_length for i in rows)])

    def batch(self, rows: Sequence[int]) -> Rollouts:
        """Return some of the rows, cut to the columns that they need; without rows, a filler of weight 0."""
        if not rows:
            return {**self._filler(), WEIGHT: 0.0}
        of_prompts, of_completions = max(self.sizes[i].prompt_length for i in rows), self.width(rows)
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

    def _filler(self) -> Rollouts:
        """Return the last row with all numbers 0, so that it adds nothing to a loss."""

        def empty(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value[-1:] if isinstance(value, list | tuple) else value
            if value.ndim == 0 or name in ("prompt_ids", "prompt_mask"):
                return value[-1:] if value.ndim else value
            return torch.zeros_like(value[-1:])

        return {name: empty(name, value) for name, value in self.rollouts.items()}


def joined(micro_batches: Sequence[Rollouts]) -> Rollouts:
    """Concatenate the rows of micro-batches of one batch."""
    first = micro_batches[0]
    if len(micro_batches) == 1:
        return first

    def join(name: str) -> Any:
        values = [batch[name] for batch in micro_batches]
        if isinstance(values[0], torch.Tensor):
            return values[0] if values[0].ndim == 0 else torch.cat(values)
        return list(chain.from_iterable(values)) if isinstance(values[0], list | tuple) else values[0]

    return {name: join(name) for name in first}


def weights(loss_type: str, num_rows: int, micro_batch: Rollouts) -> Weigh:
    """Return a function that computes the loss weight of a subset of rows of micro-batches of `num_rows` rows."""
    if loss_type in SUM_OVER_TOKENS:
        return lambda rows, batch: 1.0
    if loss_type in MEAN_OVER_ROWS:
        return lambda rows, batch: rows / num_rows
    whole = counted_tokens(micro_batch).sum().clamp(min=1.0)
    return lambda rows, batch: counted_tokens(batch).sum() / whole


def counted_tokens(rollouts: Mapping[str, Any]) -> torch.Tensor:
    """Return [B, C], 1 for tokens that losses and statistics count: sampled by the policy, in a scored completion."""
    return rollouts["completion_mask"] * rollouts.get("tool_mask", 1)

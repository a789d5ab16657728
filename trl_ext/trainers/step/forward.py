"""What goes through the policy, and backward, at once; and which of them runs.

A forward knows its layout: where it runs, TRL's loss calls the trainer back with padded ids, and the trainer scores
the running forward's flat row instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import torch

from trl_ext.packing.plan import PlannedRow, behind, prefix_row
from trl_ext.packing.prefix_cache import PrefixCache
from trl_ext.packing.step_plan import halves, num_tokens
from trl_ext.trainers.step.rows import Rollouts, StepRows
from trl_ext.trainers.step.unpadded import Unpadded, filler, plan

Loss = Callable[[Any], torch.Tensor]


class Forward(Protocol):
    """What goes through a model at once, and backward at once."""

    @property
    def level(self) -> int:
        """How often it was halved, or its budget."""

    @property
    def most_rows(self) -> int:
        """At least the rows of any rank's forward at this place; equal on all ranks."""

    @property
    def num_rows(self) -> int:
        """Rows, or pairs, on this rank; may be 0."""

    @property
    def num_tokens(self) -> int:
        """Real tokens on this rank."""

    def halves(self) -> Sequence[Self]:
        """Two smaller forwards, or only itself where no rank can cut; equally many on every rank."""

    def loss(self, loss_of: Loss) -> torch.Tensor:
        """[] its loss, by the loss of a batch."""


@dataclass(frozen=True, eq=False)
class StepForward:
    """Rows of an optimizer step that go through the policy together.

    Args:
        rows: Where they are from.
        members: Their numbers in it; none: a forward that counts for nothing.
        most_rows: As in `Forward`.
        level: As in `Forward`.
        cache: Of the prefix that all of them begin with, which other forwards have, too; None for none.
        is_whole: Whether it is a micro-batch whose loss is no sum over its rows, and stays what TRL made it.
    """

    rows: StepRows
    members: tuple[int, ...]
    most_rows: int
    level: int = 0
    cache: PrefixCache | None = None
    is_whole: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.members)

    @property
    def num_tokens(self) -> int:
        if self.is_whole:
            return sum(self.rows.sizes[i].length for i in self.members)
        return num_tokens(self.rows.planned[i] for i in self.members)

    def halves(self) -> "list[StepForward]":
        if self.is_whole:
            return [self]
        if self.most_rows < 2:
            return [replace(self, level=self.level + 1)]
        parts = halves(self.rows.planned, self.members) if self.members else ((), ())
        smaller = replace(self, most_rows=self.most_rows - 1, level=self.level + 1)
        return [replace(smaller, members=part) for part in parts]

    def batch(self) -> Rollouts:
        """Return the rows as TRL's loss takes them."""
        return self.rows.rollouts if self.is_whole else self.rows.batch(self.members)

    def loss(self, loss_of: Loss) -> torch.Tensor:
        return loss_of(self.batch())

    @cached_property
    def unpadded(self) -> Unpadded:
        """The tokens of the rows, as they stand in `batch`."""
        everything = self.rows.unpadded
        if self.is_whole:
            return everything
        if self.members:
            return everything.take(self.members, self.rows.width(self.members))
        last = everything.take([len(everything.sequences) - 1], everything.width)
        return replace(last, num_scored=np.zeros_like(last.num_scored))

    @cached_property
    def flat(self) -> PlannedRow:
        """The flat row that holds them all."""
        return plan(self.unpadded, self.rows.share_prompt, keep_all=self.rows.keep_all)[0]

    def calls(self) -> list[PlannedRow]:
        """Return what goes through the policy: the flat row, after its prefix if that has not gone through yet."""
        if self.cache is None:
            return [self.flat]
        is_behind = self.cache.num_tokens > 0 and bool(self.members)
        flat = behind(self.flat, self.cache.num_tokens) if is_behind else self.flat
        if self.cache.is_filled:
            return [flat]
        self.cache.clear()
        first = self.flat.segments[0].item
        prefix = (
            prefix_row(first, self.cache.num_tokens) if is_behind else replace(filler(self.unpadded), is_prefix=True)
        )
        return [prefix, flat]


@dataclass(frozen=True, eq=False)
class PrefixBackward:
    """The backward of a prefix, after the backward of all forwards behind it.

    Args:
        cache: The prefix's.
        level: As in `Forward`.
    """

    cache: PrefixCache
    level: int = 0
    most_rows: int = 1
    num_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return self.cache.num_tokens

    def halves(self) -> "list[PrefixBackward]":
        return [self]

    def loss(self, loss_of: Loss) -> torch.Tensor:
        return self.cache.loss()


# The forward that a loss is computed of; None where rows are scored that belong to none, as in an evaluation.
_running: "ContextVar[StepForward | None]" = ContextVar("running_forward", default=None)


def running_forward() -> StepForward | None:
    """Return the forward that runs here: the loop of the step names it, and its rows are TRL's arguments'."""
    return _running.get()


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Let a forward run inside the block; one without rows of rollouts, such as a prefix's backward, has no name."""
    token = _running.set(forward if isinstance(forward, StepForward) else None)
    try:
        yield
    finally:
        _running.reset(token)

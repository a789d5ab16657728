"""A forward of the policy with its backward, and the forward that is running.

TRL's loss calls the trainer back with padded ids; the trainer scores the flat row of the running forward instead.
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
    """Rows that go through a model together, and their backward."""

    @property
    def level(self) -> int:
        """Number of times that the forward or its budget was halved."""

    @property
    def most_rows(self) -> int:
        """Upper bound on the rows of any rank's forward at this place; equal on all ranks."""

    @property
    def num_rows(self) -> int:
        """Rows or pairs on this rank; may be 0."""

    @property
    def num_tokens(self) -> int:
        """Real tokens on this rank."""

    def halves(self) -> Sequence[Self]:
        """Return two smaller forwards, or only itself if no rank can cut; equally many on every rank."""

    def loss(self, loss_of: Loss) -> torch.Tensor:
        """Return the loss [], computed by the function of a batch."""


@dataclass(frozen=True, eq=False)
class StepForward:
    """Rows of an optimizer step that go through the policy together.

    Args:
        rows: The rows of the step.
        members: Indices of the forward's rows; without members the forward counts for nothing.
        most_rows, level: As in `Forward`.
        cache: Cache of a common prefix, which other forwards use too; None without a prefix.
        is_whole: True for a micro-batch that is forwarded unchanged, as its loss is no sum over its rows.
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
        """Return the rows in the format of TRL's loss."""
        return self.rows.rollouts if self.is_whole else self.rows.batch(self.members)

    def loss(self, loss_of: Loss) -> torch.Tensor:
        return loss_of(self.batch())

    @cached_property
    def unpadded(self) -> Unpadded:
        """Tokens of the rows, in the order of `batch`."""
        everything = self.rows.unpadded
        if self.is_whole:
            return everything
        if self.members:
            return everything.take(self.members, self.rows.width(self.members))
        last = everything.take([len(everything.sequences) - 1], everything.width)
        return replace(last, num_scored=np.zeros_like(last.num_scored))

    @cached_property
    def flat(self) -> PlannedRow:
        """The flat row that holds all members."""
        return plan(self.unpadded, self.rows.share_prompt, keep_all=self.rows.keep_all)[0]

    def calls(self) -> list[PlannedRow]:
        """Return the rows to forward: the flat row, after its prefix if the prefix is not cached yet."""
        if self.cache is None:
            return [self.flat]
        is_behind = self.cache.num_tokens > 0 and bool(self.members)
        flat = behind(self.flat, self.cache.num_tokens) if is_behind else self.flat
        if self.cache.is_filled:
            return [flat]
        self.cache.clear()
        first = self.flat.segments[0].item
        if is_behind:
            return [prefix_row(first, self.cache.num_tokens), flat]
        return [replace(filler(self.unpadded), is_prefix=True), flat]


@dataclass(frozen=True, eq=False)
class PrefixBackward:
    """The backward of a cached prefix, after the backwards of all forwards that use it; `level` as in `Forward`."""

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


# The forward whose loss is computed; None if the scored rows belong to no forward, as in an evaluation.
_running: "ContextVar[StepForward | None]" = ContextVar("running_forward", default=None)


def running_forward() -> StepForward | None:
    """Return the forward that the step's loop runs; TRL's arguments hold its rows."""
    return _running.get()


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Set the running forward inside the block; None for a forward without rollouts, such as a prefix's backward."""
    token = _running.set(forward if isinstance(forward, StepForward) else None)
    try:
        yield
    finally:
        _running.reset(token)

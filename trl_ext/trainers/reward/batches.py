"""Batches of preference pairs: flat rows, and under a token budget the same number of rows on every rank.

An optimizer step has the same pairs as in TRL, with the same weights. We choose the rank and the forward of each pair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler, get_worker_info

from trl_ext.monitor.phases import PhaseClock
from trl_ext.packing.step_plan import RowBlock, RowSize, forward_cost, plan_blocks
from trl_ext.trainers.forward.pairs import IN_MICRO_BATCH, PairRow, num_tokens_of_pair, pair_row

# Rows of (index of a pair, number of pairs in its micro-batch in TRL).
Rows = list[tuple[tuple[int, int], ...]]


class PairSizes:
    """Tokens and cost of every pair of a dataset.

    Args:
        chosen, rejected: Tokens of the sides of every pair.
        shared: Tokens that both sides begin with, forwarded once.
        hidden_size: The model's hidden size, which weighs attention against the linear layers.
    """

    def __init__(self, chosen: Sequence[int], rejected: Sequence[int], shared: Sequence[int], hidden_size: int):
        pairs = list(zip(chosen, rejected, shared, strict=True))
        self.tokens = [c + r - s for c, r, s in pairs]
        self.costs = [forward_cost([RowSize(0, s, c - s), RowSize(0, s, r - s)], hidden_size) for c, r, s in pairs]


@dataclass(eq=False)
class StepSampler(Sampler[Rows]):
    """Yields this rank's batches, lists of rows of pairs: `accumulation` batches per optimizer step.

    A batch is empty if a step needs fewer rows than batches. The last batch of a step, after which the weights
    change, always has a row.

    Args:
        batches: TRL's micro-batches of all ranks, in the order in which they go to the ranks.
        accumulation: Micro-batches of a rank in an optimizer step.
        in_group: Neighbouring ranks that get the same rows and forward them together.
        max_tokens: Most tokens of a row.
    """

    batches: BatchSampler
    sizes: PairSizes
    accumulation: int
    rank: int
    num_ranks: int
    in_group: int
    max_tokens: int
    clock: PhaseClock

    @property
    def sampler(self) -> Any:
        """The shuffling sampler, on which accelerate sets the epoch."""
        return self.batches.sampler

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size

    @property
    def drop_last(self) -> bool:
        return self.batches.drop_last

    def __len__(self) -> int:
        """Return the number of this rank's batches, which is TRL's."""
        if self.drop_last:
            return len(self.batches) // self.num_ranks
        return -(-len(self.batches) // self.num_ranks)

    def __iter__(self) -> Iterator[Rows]:
        per_step = self.accumulation * self.num_ranks
        step: list[list[int]] = []
        for batch in self.batches:
            step.append(batch)
            if len(step) == per_step:
                yield from self._batches_of(step, self.accumulation)
                step = []
        # The last step of an epoch may be short.
        left = len(step) // self.num_ranks if self.drop_last else -(-len(step) // self.num_ranks)
        if left:
            yield from self._batches_of(step[: left * self.num_ranks], left)

    def _batches_of(self, step: list[list[int]], num_batches: int) -> list[Rows]:
        pairs = [(i, len(batch)) for batch in step for i in batch]
        with self.clock.phase("layout"):
            blocks = [RowBlock((k,), self.sizes.tokens[i], self.sizes.costs[i]) for k, (i, _) in enumerate(pairs)]
            plan = plan_blocks(blocks, self.num_ranks // self.in_group, self.max_tokens)
            mine = plan.forwards[self.rank // self.in_group]
        rows = [tuple(pairs[k] for k in row) for row in mine]
        # Even, and rounded so that the last batch is never empty.
        cuts = [len(rows) * k // num_batches for k in range(num_batches + 1)]
        return [rows[a:b] for a, b in pairwise(cuts)]


@dataclass(eq=False)
class RowsOfPairs(Dataset):
    """A dataset indexed by rows of pairs: `rows[(3, 4), (8, 2)]` is the list of pair 3, from a micro-batch of 4 pairs,
    and pair 8, from a micro-batch of 2."""

    pairs: Any

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
        return [{**self.pairs[i], IN_MICRO_BATCH: size} for i, size in row]


# An upper bound of the pairs in a row of another rank, where the number is not known.
ANY_NUMBER = 2**62


@dataclass(frozen=True, eq=False)
class PairForward:
    """A row of pairs for one forward; implements `trl_ext.trainers.step.forward.Forward`."""

    row: PairRow  # may be empty
    make_row: Callable[[Sequence[Mapping[str, Any]]], PairRow]
    most_rows: int  # upper bound of the pairs in any rank's row of this forward
    in_micro_batch: int  # pairs of the row before it was halved
    level: int = 0  # how often it was halved

    @property
    def num_rows(self) -> int:
        return self.row.num_pairs

    @property
    def num_tokens(self) -> int:
        return self.row.flat.num_tokens

    def halves(self) -> "list[PairForward]":
        if self.most_rows < 2:
            return [replace(self, level=self.level + 1)]
        pairs = self.row.examples
        middle = (len(pairs) + 1) // 2
        return [
            replace(self, row=self.make_row(part), most_rows=self.most_rows - 1, level=self.level + 1)
            for part in (pairs[:middle], pairs[middle:])
        ]

    def loss(self, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return loss_of({"rows": [self.row], IN_MICRO_BATCH: self.in_micro_batch})


@dataclass(eq=False)
class PairCollator:
    """Makes `{"rows": [PairRow, ...]}` from pairs, or from planned rows of pairs.

    Args:
        max_tokens: Most tokens of a row; None for a single row. A larger pair gets a separate row.
        padded: Collates pairs with padding; its outputs are added for a `compute_metrics` that needs inputs.
    """

    share_prompt: bool
    pad_token_id: int | None
    max_tokens: int | None
    clock: PhaseClock
    padded: Callable[[list[Any]], dict[str, Any]] | None = None

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        # A data loader's worker has no part in the trainer's clock, and must not use the GPU.
        with nullcontext() if get_worker_info() else self.clock.phase("layout"):
            rows = self._rows(examples)
            batch: dict[str, Any] = {"rows": [self.row(row) for row in rows]}
            pairs = [pair for row in rows for pair in row]
            return batch | (self.padded(pairs) if self.padded and pairs else {})

    def row(self, examples: Sequence[Mapping[str, Any]]) -> PairRow:
        return pair_row(examples, self.share_prompt, self.pad_token_id)

    def _rows(self, examples: Sequence[Any]) -> Sequence[Sequence[Mapping[str, Any]]]:
        if not examples or not isinstance(examples[0], Mapping):
            return examples
        if self.max_tokens is None:
            return [examples]
        # Keep the order, so that predictions of an evaluation are in the order of the dataset.
        rows: list[list[Mapping[str, Any]]] = []
        room = 0
        for example in ({**one, IN_MICRO_BATCH: len(examples)} for one in examples):
            tokens = num_tokens_of_pair(example, self.share_prompt)
            if tokens > room or not rows:
                rows.append([])
                room = self.max_tokens
            rows[-1].append(example)
            room -= tokens
        return rows

"""Preference data: its preparation around TRL's tokenization, and batches of flat rows of pairs.

Pairs that TRL has dropped as too long are counted; the columns `shared_tokens` and `rule_gap` are added. Under a token
budget every rank gets the same number of rows. An optimizer step has the same pairs as in TRL, with the same weights.
We choose the rank and the forward of each pair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
from torch.utils.data import BatchSampler, Dataset, Sampler, get_worker_info
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.monitor.phases import PhaseClock
from trl_ext.packing.step_plan import RowBlock, RowSize, forward_cost, plan_blocks
from trl_ext.rewards.pairs import rule_gaps
from trl_ext.trainers.forward.pairs import (
    IN_MICRO_BATCH,
    SHARED,
    PairRow,
    num_shared_tokens,
    num_tokens_of_pair,
    pair_row,
)
from trl_ext.trainers.rows.sentence import columns_of

logger = logging.get_logger(__name__)

_SIDES = ["chosen_ids", "rejected_ids"]
# Columns added to the dataset. `row` is the pair's number in the user's dataset.
ROW, GAP = "row", "rule_gap"
# Rows of (index of a pair, number of pairs in its micro-batch in TRL).
Rows = list[tuple[tuple[int, int], ...]]


def report_dropped(dataset: Any, num_before: int | None, max_length: int | None, role: str) -> None:
    """Warn how many of `num_before` pairs TRL has dropped; raise DataError if none is left.

    Args:
        dataset: The pairs that are left.
        num_before: Pairs before TRL dropped some; None for a stream.
        max_length: TRL's limit.
        role: The dataset in messages.
    """
    if num_before is None or not (num_dropped := num_before - len(dataset)):
        return
    too_long = f"{num_dropped} of {num_before} pairs have a side longer than max_length={max_length} tokens"
    if num_dropped == num_before:
        raise DataError(f"{role}: {too_long}, so none is left. Raise max_length.")
    logger.warning(f"{role}: {too_long}, and are dropped. Raise max_length to keep them.")


def check_tokens_differ(dataset: Any, role: str) -> None:
    """Raise DataError if the tokens of both sides are equal in all pairs; a stream passes."""
    if not isinstance(dataset, datasets.Dataset):
        return
    if all(pair["chosen_ids"] == pair["rejected_ids"] for pair in dataset.select_columns(_SIDES)):
        raise DataError(
            f"{role}: all pairs have the same tokens on both sides. Check that the tokenizer knows the words."
        )


def add_shared_tokens(dataset: Any) -> Any:
    """Add the column `shared_tokens` if it is missing."""
    if SHARED in (dataset.column_names or ()):
        return dataset
    # A stream's map takes no description.
    options = {"desc": "Comparing the sides"} if isinstance(dataset, datasets.Dataset) else {}
    return dataset.map(lambda c, r: {SHARED: num_shared_tokens(c, r)}, input_columns=_SIDES, **options)


def add_rule_gaps(dataset: Any, rules: Any, role: str) -> Any:
    """Add the column `rule_gap`: the rules' score of chosen minus their score of rejected.

    An existing column is replaced, as sides may have been swapped since. Tokenized datasets and streams get none.
    """
    columns = columns_of(dataset, role)
    if "chosen_ids" in columns:
        return dataset
    if isinstance(dataset, datasets.IterableDataset):
        logger.warning(f"{role} is a stream, to which the rules are not applied. Give them a dataset, not a stream.")
        return dataset
    gaps = rule_gaps(dataset, rules)
    return (dataset.remove_columns(GAP) if GAP in columns else dataset).add_column(GAP, gaps)


def add_row_numbers(dataset: Any) -> Any:
    """Add the column `row`, by which messages name a pair; a stream stays as it is."""
    if not isinstance(dataset, datasets.Dataset) or ROW in dataset.column_names:
        return dataset
    return dataset.add_column(ROW, list(range(len(dataset))))


def check_budget(dataset: datasets.Dataset, pair_tokens: Sequence[int], max_tokens: int, role: str) -> None:
    """Raise DataError if a pair is larger than one forward.

    Args:
        dataset: The pairs.
        pair_tokens: Tokens of each pair.
        max_tokens: Of a forward.
        role: The dataset in messages.
    """
    too_long = [i for i, tokens in enumerate(pair_tokens) if tokens > max_tokens]
    if not too_long:
        return
    first, longest = too_long[0], max(pair_tokens)
    name = dataset[first].get(ROW, first)
    raise DataError(
        f"max_tokens_per_forward={max_tokens} is smaller than {len(too_long)} of {len(pair_tokens)} pairs of {role}; "
        f"the first is row {name} with {pair_tokens[first]} tokens, the longest has {longest}. Set it to at least "
        f"{longest}, or lower max_length."
    )


def lengths(dataset: datasets.Dataset, column: str) -> list[int]:
    """Return the number of tokens in every row of a column, without loading the token ids as lists."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return [n for table in tables for n in pc.list_value_length(table[column]).to_pylist()]


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
        rows = [tuple(map(pairs.__getitem__, row)) for row in mine]
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
    most_rows: int  # most pairs in any rank's row of this forward; ANY_NUMBER if ranks hold different numbers
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
        are_equal = self.most_rows != ANY_NUMBER  # the numbers of pairs of all ranks
        return [
            replace(
                self,
                row=self.make_row(part),
                most_rows=len(part) if are_equal else ANY_NUMBER,
                level=self.level + 1,
            )
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
            pairs = list(chain.from_iterable(rows))
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

"""Preference pairs as flat rows: both sides of a pair in one forward, after one copy of their common prefix.

Legend: N pairs of a row, T tokens of the flat row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trl_ext.packing.layout import FlatRow, flatten
from trl_ext.packing.plan import PlannedRow, Segment, plan_rows
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.step_plan import RowSize
from trl_ext.trainers.forward.pooled_head import scored_token

# Column of a tokenized dataset: length of the common prefix of a pair's sides, in tokens.
SHARED = "shared_tokens"
# Key of a pair: number of pairs in its TRL micro-batch, whose loss is the mean over them.
IN_MICRO_BATCH = "pairs_in_micro_batch"
# A row of one token and no pair, for a rank that has fewer rows than others.
_NO_PAIR = PlannedRow((Segment(0, 1, 0, 0, None),))


@dataclass(frozen=True, eq=False)
class PairRow:
    """The pairs of one forward.

    Args:
        flat: The model's input.
        pool_index: [2N] row index of the scored token of every chosen, then of every rejected side.
        margins: [N] margins that the loss subtracts from the score differences; None if the dataset has none.
        examples: The N pairs from the dataset.
    """

    flat: FlatRow
    pool_index: torch.Tensor
    margins: torch.Tensor | None
    examples: tuple[Mapping[str, Any], ...]

    @property
    def num_pairs(self) -> int:
        return len(self.examples)

    @property
    def num_raw_tokens(self) -> int:
        """Number of tokens of all sides; shared tokens count twice."""
        return sum(len(side) for side in sides(self.examples))

    @property
    def num_padded_tokens(self) -> int:
        """Number of tokens of a padded batch of the same pairs."""
        return max(map(len, sides(self.examples)), default=0) * 2 * self.num_pairs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PairRow":
        """Return a copy of the row on `device`."""
        return replace(
            self,
            flat=self.flat.to(device, non_blocking=non_blocking),
            pool_index=self.pool_index.to(device, non_blocking=non_blocking),
            margins=None if self.margins is None else self.margins.to(device, non_blocking=non_blocking),
        )


def pair_row(examples: Sequence[Mapping[str, Any]], share_prompt: bool, pad_token_id: int | None) -> PairRow:
    """Lay pairs into one flat row; without pairs return a row of one token that counts for nothing.

    `share_prompt`: one copy of the common prefix for both sides. The model's `pad_token_id` decides which token of a
    side is scored.
    """
    if not examples:
        return PairRow(flatten(_NO_PAIR, Ragged.of([[0]])), torch.zeros(0, dtype=torch.long), None, ())
    # Side 2i is pair i's chosen side, side 2i + 1 its rejected side, next to each other in the row.
    sequences = [side for example in examples for side in (example["chosen_ids"], example["rejected_ids"])]
    ragged = Ragged.of(sequences)
    items = []
    shareable: list[np.ndarray] = []
    for i, example in enumerate(examples):
        shared = shared_of(example) if share_prompt else 0
        shareable += [ragged[2 * i][:shared]] * 2
        items += [RowSize(i, shared, len(side) - shared) for side in sequences[2 * i : 2 * i + 2]]
    (row,) = plan_rows(items, shareable=shareable)
    own = {segment.item: segment for segment in row.segments if not segment.is_prefix}
    ends = [row.place(own[i], scored_token(side, pad_token_id)) for i, side in enumerate(sequences)]
    margins = None
    if "margin" in examples[0]:
        margins = torch.tensor([example["margin"] for example in examples], dtype=torch.float)
    return PairRow(flatten(row, ragged), torch.tensor(ends[0::2] + ends[1::2]), margins, tuple(examples))


def sides(examples: Sequence[Mapping[str, Any]]) -> list[Sequence[int]]:
    """Return the token ids of every chosen, then of every rejected side."""
    return [example[key] for key in ("chosen_ids", "rejected_ids") for example in examples]


def num_tokens_of_pair(example: Mapping[str, Any], share_prompt: bool) -> int:
    """Return the number of tokens of a pair in a flat row."""
    both = len(example["chosen_ids"]) + len(example["rejected_ids"])
    return both - shared_of(example) if share_prompt else both


def shared_of(example: Mapping[str, Any]) -> int:
    """Return the length of the sides' common prefix in tokens, from the dataset's column if it exists."""
    known = example.get(SHARED)
    return num_shared_tokens(example["chosen_ids"], example["rejected_ids"]) if known is None else known


def num_shared_tokens(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """Return the length of the longest common prefix that leaves each side at least one separate token."""
    limit = max(min(len(chosen), len(rejected)) - 1, 0)
    if chosen[:limit] == rejected[:limit]:
        return limit
    # Binary search for the first difference: comparing slices is faster than a loop over tokens.
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen[low:middle] == rejected[low:middle] else (low, middle)
    return low

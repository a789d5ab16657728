"""A planned row as tensors: what the model is called with.

Legend: T tokens of the flat row, S of them scored.
"""

from dataclasses import dataclass

import numpy as np
import torch

from trl_ext.packing.plan import PlannedRow
from trl_ext.packing.ragged import Ragged, runs
from trl_ext.packing.table import SegmentTable

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class FlatRow:
    """What the model is called with, but for what is asked of the result.

    Args:
        input_ids, position_ids: [1, T].
        table: Who attends to whom.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    table: SegmentTable

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "FlatRow":
        """The same row on `device`."""
        return FlatRow(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.position_ids.to(device, non_blocking=non_blocking),
            self.table.to(device),
        )


@dataclass(frozen=True, eq=False)
class PackedRow(FlatRow):
    """A flat row whose tokens are scored. The first token of a segment never is: what stands before it in the row
    belongs to somebody else.

    Args:
        scored_index: [S] row index of every scored token, sequence after sequence.
        scored_item, scored_offset: [S] the sequence of each scored token, and its place among the scored ones of it.
    """

    scored_index: torch.Tensor
    scored_item: torch.Tensor
    scored_offset: torch.Tensor


def flatten(row: PlannedRow, sequences: Ragged, device: torch.device | str = "cpu") -> FlatRow:
    """Turn a planned row into tensors.

    Args:
        row: One row of `plan_rows`.
        sequences: Token ids of the batch, shared tokens included.
        device: Where the tensors go.
    """
    lengths = np.array([segment.length for segment in row.segments])
    offsets = np.array([segment.offset for segment in row.segments])
    items = np.array([segment.item for segment in row.segments])
    return FlatRow(
        input_ids=_tensor(sequences.tokens[runs(sequences.starts[items] + offsets, lengths)], device)[None],
        position_ids=_tensor(runs(offsets, lengths), device)[None],
        table=SegmentTable(row.segments, torch.device(device)),
    )


def lay_out(
    row: PlannedRow, sequences: Ragged, num_scored: np.ndarray, device: torch.device | str = "cpu"
) -> PackedRow:
    """Turn a planned row into tensors, with the places of the trailing tokens of every sequence.

    Args:
        row, sequences, device: As in `flatten`.
        num_scored: How many trailing tokens of each sequence are scored.
    """
    flat = flatten(row, sequences, device)
    own = [segment for segment in row.segments if not segment.is_prefix]
    items = np.array([segment.item for segment in own], dtype=np.int64)
    scored = num_scored[items]
    return PackedRow(
        input_ids=flat.input_ids,
        position_ids=flat.position_ids,
        table=flat.table,
        scored_index=_tensor(
            runs(np.array([segment.end for segment in own], dtype=np.int64) - scored, scored), device
        ),
        scored_item=_tensor(np.repeat(items, scored), device),
        scored_offset=_tensor(runs(np.zeros_like(scored), scored), device),
    )


def _tensor(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device, non_blocking=True)

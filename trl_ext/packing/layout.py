"""A planned row as tensors, the inputs of the model.

Legend: T tokens of the flat row, S of them scored, R scored tokens of all sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch.nn.functional import pad

from trl_ext.packing.plan import PlannedRow, Segment
from trl_ext.packing.prefix_cache import PrefixCache
from trl_ext.packing.ragged import Ragged, runs
from trl_ext.packing.table import SegmentTable
from trl_ext.packing.ulysses import SequenceGroup

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class FlatRow:
    """The inputs of a model call, without the tokens to score.

    Args:
        input_ids, position_ids: [1, T]; for a part of a row, the tokens of the part. Positions of rows with images are
            [3, 1, T].
        table: Segment table of the whole row.
        inputs: Other inputs by name: images.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    table: SegmentTable
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "FlatRow":
        """Return the same row on `device`."""
        return FlatRow(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.position_ids.to(device, non_blocking=non_blocking),
            self.table.to(device),
            inputs={name: value.to(device, non_blocking=non_blocking) for name, value in self.inputs.items()},
        )

    def part(self, group: SequenceGroup | None) -> Self:
        """Return this process's part of the row, with the group in its table; without a group, the row itself.

        The row is padded to a multiple of the group's size by a separate segment.
        """
        if group is None:
            return self
        missing = -self.num_tokens % group.size
        end = self.table.segments[-1].end
        padding = (Segment(end, end + missing, 0, 0, None),) if missing else ()
        positions = torch.arange(missing, device=self.position_ids.device)[None]
        here = group.slice_of(self.num_tokens + missing)
        table, segments = self.table, self.table.segments + padding
        asking = range(len(table.segments) - len(table.queries), len(segments)) if table.num_cached else None
        return replace(
            self,
            input_ids=pad(self.input_ids, (0, missing))[:, here],
            position_ids=torch.cat([self.position_ids, positions], dim=1)[:, here],
            table=replace(table, segments=segments, group=group, asking=asking),
        )


@dataclass(frozen=True, eq=False)
class PackedRow(FlatRow):
    """A flat row whose tokens are scored. A token that several sequences share is scored once.

    Args:
        before: [S] row index of the token before every scored token, which predicts it; ascending.
        before_index: The same, as a tensor.
        labels: [S] the scored tokens.
        source: [R] index among the S of every scored token of every sequence; ascending.
        source_index: The same, as a tensor.
        scored_item, scored_offset: [R] their sequence, and their place among its scored tokens.
    """

    before: np.ndarray
    before_index: torch.Tensor
    labels: torch.Tensor
    source: np.ndarray
    source_index: torch.Tensor
    scored_item: torch.Tensor
    scored_offset: torch.Tensor

    def part(self, group: SequenceGroup | None) -> Self:
        """Return this process's part of the row, with the scored tokens that are predicted there."""
        part = super().part(group)
        if group is None:
            return part
        begin = part.num_tokens * group.rank
        # Searched on the host: a mask on the card would have to be waited for.
        first, end = np.searchsorted(self.before, (begin, begin + part.num_tokens))
        here, used = slice(first, end), slice(*np.searchsorted(self.source, (first, end)))
        return replace(
            part,
            before=self.before[here] - begin,
            before_index=self.before_index[here] - begin,
            labels=self.labels[here],
            source=self.source[used] - first,
            source_index=self.source_index[used] - int(first),
            scored_item=self.scored_item[used],
            scored_offset=self.scored_offset[used],
        )


def flatten(
    row: PlannedRow, sequences: Ragged, device: torch.device | str = "cpu", cache: PrefixCache | None = None
) -> FlatRow:
    """Turn a row of `plan_rows` into tensors.

    Args:
        row: Of `plan_rows`.
        sequences: The batch's token ids, shared tokens included.
        device: For the tensors.
        cache: Stores the keys of the row, or has the keys of its first segments; None without a cached prefix.
    """
    own = row.forwarded
    lengths = np.array([segment.length for segment in own])
    offsets = np.array([segment.offset for segment in own])
    items = np.array([segment.item for segment in own])
    asking = range(len(row.segments) - len(own), len(row.segments)) if row.num_cached else None
    return FlatRow(
        input_ids=_tensor(sequences.tokens[runs(sequences.starts[items] + offsets, lengths)], device)[None],
        position_ids=_tensor(runs(offsets, lengths), device)[None],
        table=SegmentTable(row.segments, torch.device(device), asking=asking, cache=cache, num_cached=row.num_cached),
    )


def lay_out(
    row: PlannedRow,
    sequences: Ragged,
    num_scored: np.ndarray,
    device: torch.device | str = "cpu",
    cache: PrefixCache | None = None,
) -> PackedRow:
    """Turn a planned row into tensors, with the places of the scored tokens.

    Args:
        row, sequences, device, cache: As in `flatten`.
        num_scored: [sequences] scored tokens at the end of each.
    """
    flat = flatten(row, sequences, device, cache)
    # Places of the tokens before scored tokens, in pieces: sequence, place in it, place in the row, length.
    pieces: list[tuple[int, int, int, int]] = []
    firsts = sequences.lengths - num_scored - 1
    for own in (segment for segment in row.segments if not segment.is_prefix):
        item, first, segment, end = own.item, firsts[own.item], own, own.offset + own.length - 1
        while end > first:
            begin = max(first, segment.offset)
            if begin < end:
                place = segment.start - row.num_cached + begin - segment.offset
                pieces.append((item, begin, place, end - begin))
            if begin == first:
                break
            assert segment.parent is not None, "The chain of prefixes holds the whole beginning."
            end, segment = segment.offset, row.segments[segment.parent]
    items, begins, starts, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    places = runs(starts, lengths)
    order = places.argsort(kind="stable") if (np.diff(places) < 0).any() else slice(None)
    is_new = np.diff(places[order], prepend=-1) > 0
    before, source = places[order][is_new], is_new.cumsum() - 1
    tokens = sequences.tokens[runs(sequences.starts[items] + begins + 1, lengths)]
    labels = np.empty(len(before), dtype=np.int64)
    labels[source] = tokens[order]
    return PackedRow(
        input_ids=flat.input_ids,
        position_ids=flat.position_ids,
        table=flat.table,
        before=before,
        before_index=_tensor(before, device),
        labels=_tensor(labels, device),
        source=source,
        source_index=_tensor(source, device),
        scored_item=_tensor(np.repeat(items, lengths)[order], device),
        scored_offset=_tensor(runs(begins - firsts[items], lengths)[order], device),
    )


def _tensor(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device, non_blocking=True)

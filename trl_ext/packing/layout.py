"""A planned row as tensors: what the model is called with.

Legend: T tokens of the flat row, K keys after the prefixes are repeated, N segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from trl_ext.packing.plan import PlannedRow, Segment

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Who attends to whom in a flat row. Travels to every attention layer as the keyword `segments`.

    Args:
        segments: The N segments in row order.
        kv_index: [K] row index of every key, prefix before own tokens, segment after segment; None when no segment
            has a prefix (then K = T and the keys lie in row order already).
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32, cumulated number of queries and keys.
        max_seqlen_q, max_seqlen_k: Longest segment in queries and in keys.
    """

    segments: tuple[Segment, ...]
    kv_index: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, repr=False)

    def mask(self, segment: Segment, window: int | None) -> torch.Tensor:
        """[queries, keys] True where a query of `segment` sees a key; built once per shape and window.

        The causal diagonal ends in the lower right corner: the last query sees every key. With a sliding window a
        query sees itself and the `window - 1` keys before it.
        """
        shape = (segment.length, segment.num_keys, window)
        if shape not in self._masks:
            self._masks[shape] = _causal_mask(*shape, device=self.cu_seqlens_q.device)
        return self._masks[shape]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SegmentTable":
        """The same table on `device`."""
        if self.cu_seqlens_q.device == torch.device(device):
            return self
        kv_index = None if self.kv_index is None else self.kv_index.to(device, non_blocking=non_blocking)
        return replace(
            self,
            kv_index=kv_index,
            cu_seqlens_q=self.cu_seqlens_q.to(device, non_blocking=non_blocking),
            cu_seqlens_k=self.cu_seqlens_k.to(device, non_blocking=non_blocking),
            _masks={},
        )


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
            self.table.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True, eq=False)
class PackedRow(FlatRow):
    """A flat row whose tokens are scored.

    Args:
        labels: [1, T] token id where it is scored, else -100. The first token of a segment is never scored: what
            stands before it in the row belongs to somebody else.
        scored_index: [S] row index of every scored token, sequence after sequence.
        scored_item, scored_offset: [S] the sequence of each scored token, and its place among the scored ones of it.
    """

    labels: torch.Tensor
    scored_index: torch.Tensor
    scored_item: torch.Tensor
    scored_offset: torch.Tensor


def flatten(row: PlannedRow, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> FlatRow:
    """Turn a planned row into tensors.

    Args:
        row: One row of `plan_rows`.
        sequences: Token ids of every sequence of the batch, shared tokens included.
        device: Where the tensors go.
    """
    ids: list[int] = []
    positions: list[int] = []
    for segment in row.segments:
        ids += sequences[segment.item][segment.offset : segment.offset + segment.length]
        positions += range(segment.offset, segment.offset + segment.length)
    return FlatRow(
        input_ids=_long(ids, device)[None],
        position_ids=_long(positions, device)[None],
        table=segment_table(row.segments, device),
    )


def lay_out(
    row: PlannedRow, sequences: Sequence[Sequence[int]], num_scored: Sequence[int], device: torch.device | str = "cpu"
) -> PackedRow:
    """Turn a planned row into tensors, with labels for the trailing tokens of every sequence.

    Args:
        row, sequences, device: As in `flatten`.
        num_scored: How many trailing tokens of each sequence carry a label.
    """
    labels: list[int] = []
    index: list[int] = []
    items: list[int] = []
    offsets: list[int] = []
    for segment in row.segments:
        tokens = sequences[segment.item][segment.offset : segment.offset + segment.length]
        scored = 0 if segment.is_prefix else num_scored[segment.item]
        labels += [IGNORE_INDEX] * (segment.length - scored)
        labels += tokens[segment.length - scored :]
        index += range(segment.end - scored, segment.end)
        items += [segment.item] * scored
        offsets += range(scored)
    flat = flatten(row, sequences, device)
    return PackedRow(
        input_ids=flat.input_ids,
        position_ids=flat.position_ids,
        table=flat.table,
        labels=_long(labels, device)[None],
        scored_index=_long(index, device),
        scored_item=_long(items, device),
        scored_offset=_long(offsets, device),
    )


def segment_table(segments: tuple[Segment, ...], device: torch.device | str = "cpu") -> SegmentTable:
    """The attention table of a row's segments, on `device`."""
    queries = [s.length for s in segments]
    keys = [s.num_keys for s in segments]
    kv_index = None
    if keys != queries:
        flat = [i for s in segments for span in (s.prefix, (s.start, s.end)) for i in range(*span)]
        kv_index = _long(flat, device)
    return SegmentTable(
        segments=segments,
        kv_index=kv_index,
        cu_seqlens_q=_cumulated(queries, device),
        cu_seqlens_k=_cumulated(keys, device),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(keys),
    )


def _long(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)


def _cumulated(lengths: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask if window is None else mask.triu(num_keys - num_queries - window + 1)

"""The attention pattern of a flat row, in the formats that attention kernels need.

Legend: T tokens of the flat row, K keys after the prefixes are repeated, N segments, M of them with queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from trl_ext.packing.plan import Segment
from trl_ext.packing.prefix_cache import PrefixCache
from trl_ext.packing.ragged import cumulated, runs
from trl_ext.packing.ulysses import SequenceGroup


@dataclass(frozen=True, eq=False)
class KeyCopies:
    """Keys of every segment with a copy of its prefixes, in segment order.

    Args:
        index: [K] row index of every key, outer prefix first; None if no segment has a prefix (then K = T, in row
            order).
        cu_seqlens: [M + 1] int32, cumulated number of keys.
        longest: Most keys of a segment.
    """

    index: torch.Tensor | None
    cu_seqlens: torch.Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a varlen kernel: runs of queries, each with the run of keys that it sees.

    Args:
        queries, keys: Their places in the row, run after run: a slice, or the index of each.
        query_lengths, key_lengths: Tokens of every run.
        cu_queries, cu_keys: Boundaries of the runs, int32.
        is_causal: True if each run of queries is also its run of keys, or the end of it, seen causally; False if a
            query sees its whole run of keys.
    """

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    is_causal: bool


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """The segments of a flat row, passed to every attention layer as the keyword `segments`.

    The inputs of kernels are computed when first needed, once per row: no kernel needs all of them.

    Args:
        segments: The N segments in row order, a parent before its children.
        device: Device of the tensors.
        group: Processes that share the row, each with a part of it; None if this process has all of it.
        asking: Numbers of the M segments whose tokens are queries; None for all, M = N.
        cache: Stores the keys of this row, or has the keys of its first segments from an earlier forward.
        num_cached: Tokens of the cached segments; they are not queries.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    group: SequenceGroup | None = None
    asking: Sequence[int] | None = None
    cache: PrefixCache | None = None
    num_cached: int = 0
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _of_lines: dict[int, "SegmentTable"] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every segment."""
        return [segment.length for segment in self.segments]

    @cached_property
    def queries(self) -> dict[int, Segment]:
        """The segments whose tokens are queries, by number."""
        numbers = range(len(self.segments)) if self.asking is None else self.asking
        return {number: self.segments[number] for number in numbers}

    @cached_property
    def query_lengths(self) -> list[int]:
        """Tokens of every segment with queries."""
        return [segment.length for segment in self.queries.values()]

    @cached_property
    def key_lengths(self) -> list[int]:
        """Keys that every segment with queries sees, its prefixes' included."""
        return [segment.num_keys for segment in self.queries.values()]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """[M + 1] int32, cumulated number of queries."""
        return self.cumulated(self.query_lengths)

    def of_line(self, num_heads: int) -> "SegmentTable":
        """Return the table for this process's attention, whose queries are the tokens of its line in the group.

        If the line's queries begin or end within a segment, the segment is cut in two, the first a prefix of the
        second. `num_heads` counts the model's query heads.
        """
        assert self.group is not None
        lines = self.group.lines(num_heads)
        if len(lines) == 1:
            return self
        if num_heads not in self._of_lines:
            first = self.num_cached
            each = (self.segments[-1].end - first) // self.group.size
            own = set(lines[self.group.rank // len(lines[0])])
            edges = [first + part * each for part in range(1, self.group.size) if (part in own) != (part - 1 in own)]
            pieces = _cut(self.segments, edges)
            asking = [
                number
                for number, piece in enumerate(pieces)
                if piece.start >= first and (piece.start - first) // each in own
            ]
            self._of_lines[num_heads] = SegmentTable(
                pieces, self.device, asking=asking, cache=self.cache, num_cached=self.num_cached
            )
        return self._of_lines[num_heads]

    @cached_property
    def chains(self) -> list[list[int]]:
        """Numbers of the segments that each segment sees: its prefixes, outer first, then itself."""
        chains: list[list[int]] = []
        for number, segment in enumerate(self.segments):
            chains.append([*(() if segment.parent is None else chains[segment.parent]), number])
        return chains

    @cached_property
    def copies(self) -> KeyCopies:
        """The keys for kernels that need a segment's keys next to each other."""
        index = None
        if self.key_lengths != self.lengths:
            seen = [self.segments[number] for asking in self.queries for number in self.chains[asking]]
            index = self.on_device(tokens_of(seen))
        return KeyCopies(index, self.cumulated(self.key_lengths), self.longest)

    @cached_property
    def copied(self) -> AttentionCall:
        """The one call that computes attention with copies of keys."""
        keys = slice(0, self.num_keys) if self.copies.index is None else self.copies.index
        return AttentionCall(
            slice(0, sum(self.query_lengths)),
            keys,
            self.query_lengths,
            self.key_lengths,
            self.cu_seqlens,
            self.copies.cu_seqlens,
            is_causal=True,
        )

    @cached_property
    def num_keys(self) -> int:
        """K: keys of all segments with queries; a prefix's keys count for every segment that sees it."""
        return sum(self.key_lengths)

    @cached_property
    def longest(self) -> int:
        """Most keys that a query sees."""
        return max(self.key_lengths)

    @cached_property
    def parts(self) -> tuple[AttentionCall, ...]:
        """The calls that compute attention without copies of keys: each segment on itself, then one call per level.

        A level's call has each prefix of that level once, with the queries of all segments that see it.
        """
        users: list[dict[int, list[int]]] = []  # for every level, the segments that see each prefix
        for number in self.queries:
            for level, prefix in enumerate(self.chains[number][:-1]):
                if level == len(users):
                    users.append({})
                users[level].setdefault(prefix, []).append(number)
        lengths, ends = self.query_lengths, self.cu_seqlens
        keys = self._where([(segment.start, segment.end) for segment in self.queries.values()])
        own = AttentionCall(slice(0, sum(lengths)), keys, lengths, lengths, ends, ends, is_causal=True)
        return own, *(self._level(dict(sorted(one.items()))) for one in users)

    def _level(self, users: dict[int, list[int]]) -> AttentionCall:
        queries = [sum(map(self.lengths.__getitem__, segments)) for segments in users.values()]
        prefixes = [self.segments[number] for number in users]
        keys = [prefix.length for prefix in prefixes]
        place = dict(zip(self.queries, pairwise(cumulated(self.query_lengths).tolist()), strict=True))
        return AttentionCall(
            self._where([place[i] for segments in users.values() for i in segments]),
            self._where([(prefix.start, prefix.end) for prefix in prefixes]),
            queries,
            keys,
            self.cumulated(queries),
            self.cumulated(keys),
            is_causal=False,
        )

    def _where(self, spans: list[tuple[int, int]]) -> slice | torch.Tensor:
        """Return the index of every token of these spans, as a slice if they are adjacent."""
        if all(one[1] == other[0] for one, other in pairwise(spans)):
            return slice(spans[0][0], spans[-1][1])
        begins, ends = np.array(spans).T
        return self.on_device(runs(begins, ends - begins))

    def cumulated(self, lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Return the boundaries of runs of these lengths, int32 as kernels need it, on the row's device."""
        return self.on_device(cumulated(lengths).astype(np.int32))

    def on_device(self, values: np.ndarray) -> torch.Tensor:
        """Return the values as a tensor on the row's device, without waiting for the work that the device has."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def mask(self, segment: Segment, window: int | None) -> torch.Tensor:
        """Return [queries, keys], True where a query of `segment` sees a key; built once per shape and window.

        The causal diagonal ends in the lower right corner: the last query sees every key. With a sliding window a
        query sees itself and the `window - 1` keys before it.
        """
        queries, keys = segment.length, segment.num_keys
        if (shape := (queries, keys, window)) not in self._masks:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=self.device).tril(keys - queries)
            self._masks[shape] = mask if window is None else mask.triu(keys - queries - window + 1)
        return self._masks[shape]

    def to(self, device: torch.device | str) -> "SegmentTable":
        """Return the same table on `device`."""
        device = torch.device(device)
        return self if device == self.device else replace(self, device=device)


def tokens_of(segments: Sequence[Segment]) -> np.ndarray:
    """Return the row index of every token of these segments, in their order."""
    return runs([segment.start for segment in segments], [segment.length for segment in segments])


def _cut(segments: Sequence[Segment], edges: Sequence[int]) -> tuple[Segment, ...]:
    """Cut segments at these places of the row. The earlier pieces of a segment are prefixes of its later pieces."""
    pieces: list[Segment] = []
    last: list[int] = []  # for every segment, the number of its last piece
    for segment in segments:
        parent = None if segment.parent is None else last[segment.parent]
        inner = [edge for edge in edges if segment.start < edge < segment.end]
        for start, end in pairwise([segment.start, *inner, segment.end]):
            offset = segment.offset + start - segment.start
            pieces.append(replace(segment, start=start, end=end, offset=offset, parent=parent))
            parent = len(pieces) - 1
        last.append(len(pieces) - 1)
    return tuple(pieces)

"""Who attends to whom in a flat row, in the forms that attention kernels ask for.

Legend: T tokens of the flat row, K keys after the prefixes are repeated, N segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from trl_ext.packing.plan import Segment
from trl_ext.packing.ragged import cumulated, runs
from trl_ext.packing.ulysses import SequenceGroup


@dataclass(frozen=True, eq=False)
class KeyCopies:
    """Keys of every segment with a copy of its prefixes, segment after segment.

    Args:
        index: [K] row index of every key, outer prefix first; None when no segment has a prefix (then K = T and the
            keys lie in row order already).
        cu_seqlens: [N + 1] int32, cumulated number of keys.
        longest: Most keys of a segment.
    """

    index: torch.Tensor | None
    cu_seqlens: torch.Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a varlen kernel: runs of queries, each with the run of keys that it sees.

    Args:
        queries, keys: Where they lie in the row, run after run: a slice, or the index of each of them.
        query_lengths, key_lengths: Tokens of every run.
        cu_queries, cu_keys: Where the runs begin and end, int32.
        is_causal: True where the runs of queries and of keys are the same, and a query sees none after itself; False
            where a query sees its whole run of keys.
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
    """The segments of a flat row. Travels to every attention layer as the keyword `segments`.

    What a kernel needs of it is made when it is first asked for, once a row: no kernel needs everything.

    Args:
        segments: The N segments in row order, a parent before its children.
        device: Where the tensors are.
        group: Processes that share the row, of which each forwards a part; None: this one forwards all of it.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    group: SequenceGroup | None = None
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every segment."""
        return [segment.length for segment in self.segments]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """[N + 1] int32, cumulated number of queries."""
        return self.cumulated(self.lengths)

    @cached_property
    def chains(self) -> list[list[int]]:
        """The numbers of the segments that each segment sees: its prefixes, outer first, then itself."""
        chains: list[list[int]] = []
        for number, segment in enumerate(self.segments):
            chains.append([*(() if segment.parent is None else chains[segment.parent]), number])
        return chains

    @cached_property
    def copies(self) -> KeyCopies:
        """The keys for kernels that want those of a segment side by side."""
        keys = [segment.num_keys for segment in self.segments]
        index = None
        if keys != self.lengths:
            seen = [self.segments[number] for chain in self.chains for number in chain]
            flat = runs([segment.start for segment in seen], [segment.length for segment in seen])
            index = torch.from_numpy(flat).to(self.device)
        return KeyCopies(index, self.cumulated(keys), self.longest)

    @cached_property
    def num_keys(self) -> int:
        """K: keys of all segments, those of prefixes counted for every segment that sees them."""
        return sum(segment.num_keys for segment in self.segments)

    @cached_property
    def longest(self) -> int:
        """Most keys that a token sees."""
        return max(segment.num_keys for segment in self.segments)

    @cached_property
    def parts(self) -> tuple[AttentionCall, ...]:
        """The calls that compute attention without a copy of keys: each segment on itself, then a call a level.

        In the call of a level all segments that have a prefix there see it, and each prefix stands in it once.
        """
        users: list[dict[int, list[int]]] = []  # of every level, the segments that see each prefix
        for number, chain in enumerate(self.chains):
            for level, prefix in enumerate(chain[:-1]):
                if level == len(users):
                    users.append({})
                users[level].setdefault(prefix, []).append(number)
        whole = slice(0, self.segments[-1].end)
        own = AttentionCall(whole, whole, self.lengths, self.lengths, self.cu_seqlens, self.cu_seqlens, is_causal=True)
        return own, *(self._level(dict(sorted(one.items()))) for one in users)

    def _level(self, users: dict[int, list[int]]) -> AttentionCall:
        queries = [sum(self.lengths[i] for i in segments) for segments in users.values()]
        keys = [self.lengths[prefix] for prefix in users]
        return AttentionCall(
            self._where([i for segments in users.values() for i in segments]),
            self._where(list(users)),
            queries,
            keys,
            self.cumulated(queries),
            self.cumulated(keys),
            is_causal=False,
        )

    def _where(self, numbers: list[int]) -> slice | torch.Tensor:
        """Return the row index of every token of these segments, as a slice if they lie side by side."""
        segments = [self.segments[number] for number in numbers]
        if all(one.end == other.start for one, other in pairwise(segments)):
            return slice(segments[0].start, segments[-1].end)
        return torch.from_numpy(runs([s.start for s in segments], [s.length for s in segments])).to(self.device)

    def cumulated(self, lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Return where runs of these lengths begin and end, int32 as kernels want it, on the row's device."""
        return torch.from_numpy(cumulated(lengths).astype(np.int32)).to(self.device)

    def mask(self, segment: Segment, window: int | None) -> torch.Tensor:
        """[queries, keys] True where a query of `segment` sees a key; built once per shape and window.

        The causal diagonal ends in the lower right corner: the last query sees every key. With a sliding window a
        query sees itself and the `window - 1` keys before it.
        """
        queries, keys = segment.length, segment.num_keys
        if (shape := (queries, keys, window)) not in self._masks:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=self.device).tril(keys - queries)
            self._masks[shape] = mask if window is None else mask.triu(keys - queries - window + 1)
        return self._masks[shape]

    def to(self, device: torch.device | str) -> "SegmentTable":
        """The same table on `device`."""
        device = torch.device(device)
        return self if device == self.device else SegmentTable(self.segments, device, self.group)

"""Who attends to whom in a flat row, in the forms that attention kernels ask for.

Legend: T tokens of the flat row, K keys after the prefixes are repeated, N segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from trl_ext.packing.plan import Segment
from trl_ext.packing.ragged import cumulated, runs


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
class SegmentTable:
    """The segments of a flat row. Travels to every attention layer as the keyword `segments`.

    What a kernel needs of it is made when it is first asked for, once a row: no kernel needs everything.

    Args:
        segments: The N segments in row order, a parent before its children.
        device: Where the tensors are.
    """

    segments: tuple[Segment, ...]
    device: torch.device
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
        return KeyCopies(index, self.cumulated(keys), max(keys))

    def cumulated(self, lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Return where runs of these lengths begin and end, int32 as kernels want it, on the row's device."""
        return torch.from_numpy(cumulated(lengths).astype(np.int32)).to(self.device)

    def mask(self, segment: Segment, window: int | None) -> torch.Tensor:
        """[queries, keys] True where a query of `segment` sees a key; built once per shape and window.

        The causal diagonal ends in the lower right corner: the last query sees every key. With a sliding window a
        query sees itself and the `window - 1` keys before it.
        """
        shape = (segment.length, segment.num_keys, window)
        if shape not in self._masks:
            self._masks[shape] = _causal_mask(*shape, device=self.device)
        return self._masks[shape]

    def to(self, device: torch.device | str) -> "SegmentTable":
        """The same table on `device`."""
        device = torch.device(device)
        return self if device == self.device else SegmentTable(self.segments, device)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask if window is None else mask.triu(num_keys - num_queries - window + 1)

"""Convolutions and recurrences over the segments of a flat row: each segment continues from the end of its prefix.

A convolution reads the last inputs of the prefixes before the segment. A recurrence runs level by level: prefixes
first, then the segments after them from the prefixes' final states, through which gradients flow back.

Legend: T tokens of the flat row, S tokens with padding, N segments of a call, L tokens of the longest of them,
C channels, H heads, D head size, W taps of a convolution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_ext.packing.ragged import runs
from trl_ext.packing.table import SegmentTable

# Segments are padded to the longest of a call. A segment shorter than this fraction of it starts another call.
_SHORTEST = 0.75


@dataclass(frozen=True, eq=False)
class _Call:
    """Segments of one level that a recurrence processes in one call.

    Args:
        shape: [N, L] of a padded call, else [1, S].
        cu_seqlens: Boundaries of the segments, int32; None for a padded call.
        parents: [N] indices of the segments' prefixes in the level above; None on the first level.
    """

    shape: tuple[int, int]
    cu_seqlens: torch.Tensor | None
    parents: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Arrangement:
    """The tokens of a row in the order of a recurrence's calls.

    Args:
        levels: The calls of every level, in order.
        index: [S] row index of every token, any index for padding; None if the order is the row's.
        is_padding: [S, 1] True for padding; None without padding.
        place: [T] index among the S of every token of the row; None if the order is the row's.
    """

    levels: list[list[_Call]]
    index: torch.Tensor | None
    is_padding: torch.Tensor | None
    place: torch.Tensor | None

    def take(self, x: torch.Tensor, is_neutral_at_zero: bool = False) -> list[torch.Tensor]:
        """Return the inputs of all calls, from [1, T, ...]; padding is 0 if `is_neutral_at_zero`."""
        taken = x[0] if self.index is None else x[0].index_select(0, self.index)
        if is_neutral_at_zero and self.is_padding is not None:
            taken = taken.masked_fill(self.is_padding.view(-1, *[1] * (taken.dim() - 1)), 0)
        shapes = [call.shape for calls in self.levels for call in calls]
        parts = taken.split([n * t for n, t in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def run(
        self,
        inputs: Sequence[list[torch.Tensor]],
        recurrence: Callable[[Sequence[torch.Tensor], _Call, torch.Tensor | None, bool], Any],
    ) -> torch.Tensor:
        """Return a recurrence's output for every token, [1, T, ...]; each of `inputs` is from `take`.

        `recurrence` is called with the inputs of a call, the call, the first states [N, ...] (None: zeros), and
        whether final states are needed. It returns its outputs, and the final states if needed.
        """
        outputs: list[torch.Tensor] = []
        above: torch.Tensor | None = None
        of_call = iter(zip(*inputs, strict=True))
        for number, calls in enumerate(self.levels, start=1):
            finals = []
            for call in calls:
                first = None if above is None or call.parents is None else above.index_select(0, call.parents)
                output, final = recurrence(next(of_call), call, first, number < len(self.levels))
                outputs.append(output.flatten(0, 1))
                finals.append(final)
            above = torch.cat(finals) if number < len(self.levels) else None
        flat = torch.cat(outputs)
        return (flat if self.place is None else flat.index_select(0, self.place))[None]


class ConvolutionLayout(NamedTuple):
    """The layout of a row for a convolution, in which no segment reads another sequence; S inputs, T tokens."""

    inputs: torch.Tensor  # [S] row index of each input: each segment after the inputs of its prefixes that it reads
    is_zero: torch.Tensor  # indices among the S before the start of a sequence, which are zero
    own: torch.Tensor  # [T] index among the S of every token of the row


@dataclass(frozen=True, eq=False)
class StateOrder:
    """The order in which layers with state process a flat row, passed to them as the keyword `state_order`.

    `is_read` is not empty once a layer has received it.
    """

    table: SegmentTable
    is_read: list[bool] = field(default_factory=list, repr=False)
    _arranged: dict[bool, _Arrangement] = field(default_factory=dict, repr=False)
    _reads: dict[int, ConvolutionLayout] = field(default_factory=dict, repr=False)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array(self.table.lengths)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array([segment.start for segment in self.table.segments])

    @cached_property
    def shares(self) -> bool:
        """Whether some segment has a prefix."""
        return any(segment.parent is not None for segment in self.table.segments)

    @cached_property
    def number_of_sequence(self) -> torch.Tensor:
        """[1, T] int32, the number of every token's segment."""
        numbers = np.repeat(np.arange(len(self.table.lengths), dtype=np.int32), self.table.lengths)
        return self.table.on_device(numbers)[None]

    def arranged(self, is_padded: bool) -> _Arrangement:
        """Return the row as calls of padded segments of similar length, or as one call per level without padding."""
        if is_padded not in self._arranged:
            self._arranged[is_padded] = self._arrange(is_padded)
        return self._arranged[is_padded]

    def _arrange(self, is_padded: bool) -> _Arrangement:
        depths = np.array([len(chain) for chain in self.table.chains])
        levels: list[list[_Call]] = []
        index, is_real = [], []
        above: list[int] = []
        for depth in range(1, depths.max() + 1):
            numbers = (depths == depth).nonzero()[0].tolist()
            groups = self._by_length(numbers) if is_padded else [numbers]
            levels.append([self._call(group, above, is_padded) for group in groups])
            for group in groups:
                lengths = self._lengths[group]
                widths = np.full_like(lengths, lengths.max()) if is_padded else lengths
                index.append(runs(self._starts[group], widths))
                is_real.append(runs(np.zeros_like(lengths), widths) < np.repeat(lengths, widths))
            above = list(chain.from_iterable(groups))
        flat, real = np.concatenate(index), np.concatenate(is_real)
        num_tokens = self._lengths.sum()
        if len(flat) == num_tokens and (np.diff(flat) == 1).all():
            return _Arrangement(levels, None, None, None)
        place = np.empty(num_tokens, dtype=np.int64)
        place[flat[real]] = real.nonzero()[0]
        is_padding = None if real.all() else self.table.on_device(~real)
        return _Arrangement(levels, self._tensor(flat.clip(max=num_tokens - 1)), is_padding, self._tensor(place))

    def _call(self, group: list[int], above: list[int], is_padded: bool) -> _Call:
        lengths = self._lengths[group]
        shape = (len(group), int(lengths.max())) if is_padded else (1, int(lengths.sum()))
        cu_seqlens = None if is_padded else self.table.cumulated(lengths)
        parents = [
            above.index(segment.parent) for i in group if (segment := self.table.segments[i]).parent is not None
        ]
        return _Call(shape, cu_seqlens, self._tensor(parents) if parents else None)

    def _by_length(self, numbers: list[int]) -> list[list[int]]:
        lengths, groups = self.table.lengths, list[list[int]]()
        for number in sorted(numbers, key=lambda number: -lengths[number]):
            if not groups or lengths[number] < _SHORTEST * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(number)
        return groups

    def reads(self, num_before: int) -> ConvolutionLayout:
        """Return the layout of the row for a convolution that reads `num_before` inputs, W - 1, before a token."""
        if num_before not in self._reads:
            index: list[np.ndarray] = []
            for segment, chain in zip(self.table.segments, self.table.chains, strict=True):
                missing, before = num_before, list[np.ndarray]()
                for one in (self.table.segments[number] for number in reversed(chain[:-1])):
                    before.insert(0, np.arange(max(one.start, one.end - missing), one.end))
                    missing -= len(before[0])
                index += [np.full(missing, -1), *before, np.arange(segment.start, segment.end)]
            flat = np.concatenate(index)
            own = runs(np.cumsum(self._lengths + num_before) - self._lengths, self._lengths)
            is_zero = (flat < 0).nonzero()[0]
            inputs, zeros = self._tensor(flat.clip(0)), self._tensor(is_zero)
            self._reads[num_before] = ConvolutionLayout(inputs, zeros, self._tensor(own))
        return self._reads[num_before]

    def _tensor(self, values: Any) -> torch.Tensor:
        return self.table.on_device(np.asarray(values, dtype=np.int64))

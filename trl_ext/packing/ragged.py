"""Sequences of different lengths, one after the other in one array."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Ragged:
    """Token ids of several sequences, concatenated; `starts` has the start of each, and the end of the last."""

    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "Ragged":
        tokens = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        return cls(np.concatenate(tokens), cumulated([len(one) for one in tokens]))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def take(self, rows: Sequence[int]) -> "Ragged":
        """Return some of the sequences."""
        index = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[index]
        return Ragged(self.tokens[runs(self.starts[index], lengths)], cumulated(lengths))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


def cumulated(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return cumulative sums of the lengths, starting with 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def runs(starts: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `lengths[i]` consecutive numbers from each `starts[i]`, concatenated."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends):
        return ends
    return np.repeat(np.asarray(starts) - ends + lengths, lengths) + np.arange(ends[-1])

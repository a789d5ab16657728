"""The trainer's metrics and token counts, when a forward is taken again in chunks.

What a failed forward wrote is rolled back. What the chunks wrote becomes one entry of the micro-batch: TRL averages
entries, and a micro-batch of two chunks must not weigh twice.
"""

import copy
from collections.abc import Sequence
from typing import Any

# Sums over tokens divided by a constant of the step: the chunks' add up.
SUMS = frozenset({"loss/policy_avg", "loss/value_avg"})


class MetricsRollback:
    """A mark in the trainer's metrics and token counts, to which they can be rolled back.

    Args:
        trainer: With `_metrics["train"]`, lists by name, and `_tokens`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._metrics = trainer._metrics["train"]
        self._lengths = {name: len(values) for name, values in self._metrics.items()}
        self._tokens = copy.deepcopy(trainer._tokens)
        self._num_stats = len(getattr(trainer, "_step_stats", ()))
        self._total_tokens = getattr(trainer, "_total_train_tokens", None)

    def roll_back(self) -> None:
        """Remove everything that was written since the mark."""
        for name, values in self._metrics.items():
            del values[self._lengths.get(name, 0) :]
        self._trainer._tokens = copy.deepcopy(self._tokens)
        if self._num_stats or hasattr(self._trainer, "_step_stats"):
            del self._trainer._step_stats[self._num_stats :]
        if self._total_tokens is not None:
            self._trainer._total_train_tokens = self._total_tokens

    def merge(self, sizes: Sequence[int]) -> None:
        """Make one entry of the chunks' entries since the mark.

        Args:
            sizes: Rows of each chunk on this rank.
        """
        for name, values in self._metrics.items():
            start = self._lengths.get(name, 0)
            # Others hold one value that is replaced, not added to.
            if len(values) - start == len(sizes):
                values[start:] = [_one(name, values[start:], sizes)]


def _one(name: str, values: Sequence[float], sizes: Sequence[int]) -> float:
    last = name.rpartition("/")[2]
    if name in SUMS:
        return sum(values)
    if last.endswith("_min") or last.startswith("min_"):
        return min(values)
    if last.endswith("_max") or last.startswith("max_"):
        return max(values)
    weighed = [(value, size) for value, size in zip(values, sizes, strict=True) if size]
    return sum(value * size for value, size in weighed) / max(sum(size for _, size in weighed), 1)

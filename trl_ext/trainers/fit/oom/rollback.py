"""The trainer's counters, when a forward is taken again in halves: what the failed one wrote is rolled back."""

import copy
from typing import Any


class StepRollback:
    """A mark in the numbers of the running optimizer step, to which they can be rolled back.

    Args:
        trainer: With `_step_stats`, a list with an entry a forward, and `_tokens`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._num_stats = len(trainer._step_stats)
        self._tokens = copy.deepcopy(trainer._tokens)

    def roll_back(self) -> None:
        """Remove everything that was written since the mark."""
        del self._trainer._step_stats[self._num_stats :]
        self._trainer._tokens = copy.deepcopy(self._tokens)

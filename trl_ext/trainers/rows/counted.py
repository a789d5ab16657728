"""The rows of an evaluation's batches that count: processes fill the last batch with rows of the first batch."""

import math
from typing import Any

from transformers.trainer_utils import has_length


def num_rows_of(dataset: Any) -> float:
    """Return the number of rows, infinity for a stream."""
    return len(dataset) if has_length(dataset) else math.inf


class CountedRows:
    """Counts the rows of an evaluation down, so that each counts once.

    Args:
        num_rows: Rows of all ranks, infinity for a stream. Rows after these only fill the last batch.

    Attributes:
        left: Rows of all ranks in the running batch and the batches after it.
        num_rows: Rows of the running batch on this rank that count. They come first.
    """

    def __init__(self, num_rows: float):
        self.left = num_rows
        self.num_rows = 0

    def begin_batch(self, num_rows: int, rank: int) -> None:
        """Begin a batch of `num_rows` rows on each rank."""
        self.num_rows = int(min(max(self.left - rank * num_rows, 0), num_rows))

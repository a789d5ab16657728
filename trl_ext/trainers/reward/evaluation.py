"""An evaluation of a reward model, in which every pair counts once.

TRL logs the mean of the batches' means: a last batch of one pair weighs as much as the others, and ranks fill it with
pairs of the first batch, which also enter the loss.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_ext.trainers.reward.loss import JudgedPair, PairStats, judged, pair_losses, pair_stats
from trl_ext.trainers.rows.counted import CountedRows


class EvaluatedPairs(CountedRows):
    """The pairs of an evaluation's batches, with their scores."""

    def __init__(self, num_pairs: float = math.inf):
        super().__init__(num_pairs)
        self._judged: list[JudgedPair] = []

    def add(
        self,
        accelerator: Accelerator,
        examples: Sequence[Mapping[str, Any]],
        chosen: torch.Tensor,
        rejected: torch.Tensor,
        center: float | None,
    ) -> torch.Tensor:
        """Add a batch of N pairs on each rank, and return the mean loss of this rank's pairs that count, 0 for none.

        transformers averages the ranks' means, each as often as pairs of its rank count.

        Args:
            accelerator: Knows the rank and the number of ranks.
            examples: This rank's N pairs.
            chosen, rejected: [N] scores.
            center: As in `pair_losses`.
        """
        self.begin_batch(len(examples), accelerator.process_index)
        self.left -= len(examples) * accelerator.num_processes
        examples, chosen, rejected = examples[: self.num_rows], chosen[: self.num_rows], rejected[: self.num_rows]
        self._judged += judged(examples, chosen, rejected)
        margins = torch.tensor([float(example.get("margin", 0)) for example in examples], device=chosen.device)
        return pair_losses(chosen, rejected, margins, center).sum() / max(len(examples), 1)

    def of_all_ranks(self) -> list[JudgedPair]:
        """Return the pairs of all ranks. Collective."""
        return list(gather_object(self._judged))


def trl_metrics(pairs: Sequence[JudgedPair]) -> dict[str, float]:
    """Return the metrics of TRL's evaluation over all pairs, without `num_tokens`."""
    scores = torch.tensor([(pair.chosen, pair.rejected) for pair in pairs])
    return PairStats(*pair_stats(scores[:, 0], scores[:, 1], 0).tolist()).metrics()

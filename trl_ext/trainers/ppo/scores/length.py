"""A reward model's scores without what length alone explains.

Reward models tend to like long answers, whatever these say. A line through the scores seen so far over the lengths of
their completions tells how much a token is worth to the model; that much is taken off for each token above the mean
length, and added for each below it.

Source: arXiv:2409.17407 (a bias is estimated from the scores by regression on length, and subtracted; there by a local
line, here by one), arXiv:2404.04475 (the same as a term of a regression).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch


@dataclass(slots=True)
class LengthControl:
    """The line through scores over lengths, of everything seen.

    Source of the running sums: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances (1979), equation 2.1, and the same for the product of two deviations.
    """

    _count: float = 0.0
    _length: float = 0.0  # mean
    _score: float = 0.0  # mean
    _squares: float = 0.0  # of lengths' deviations
    _products: float = 0.0  # of lengths' and scores' deviations

    @property
    def slope(self) -> float:
        """What one token adds to a score; 0 where lengths do not vary."""
        return self._products / self._squares if self._squares > 0 else 0.0

    def __call__(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Take scores into account, then return them without what their lengths explain.

        Args:
            scores: [N] of all ranks, in the same order on each. NaN and infinite ones stay what they are, and do not
                enter the line.
            lengths: [N] tokens of their completions.
        """
        both = list(zip(lengths.tolist(), scores.tolist(), strict=True))
        self._add([(length, score) for length, score in both if isfinite(score)])
        slope, mean = self.slope, self._length
        kept = [score - slope * (length - mean) for length, score in both]
        return torch.tensor(kept, dtype=torch.float32, device=scores.device)

    def _add(self, pairs: Sequence[tuple[float, float]]) -> None:
        if not pairs:
            return
        num = len(pairs)
        length, score = (sum(values) / num for values in zip(*pairs, strict=True))
        deviations = [(x - length, y - score) for x, y in pairs]
        count = self._count + num
        share, apart = self._count * num / count, length - self._length
        self._squares += sum(x * x for x, _ in deviations) + share * apart**2
        self._products += sum(x * y for x, y in deviations) + share * apart * (score - self._score)
        self._length += apart * num / count
        self._score += (score - self._score) * num / count
        self._count = count

    def state_dict(self) -> dict[str, list[float]]:
        return {"line": [self._count, self._length, self._score, self._squares, self._products]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._count, self._length, self._score, self._squares, self._products = state["line"]

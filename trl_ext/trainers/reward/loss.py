"""Loss and statistics of preference pairs. Legend: N pairs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


def pair_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor | None = None, center: float | None = None
) -> torch.Tensor:
    """The loss of every pair: Bradley-Terry's negative log-likelihood, and the penalty on scores far from zero.

    Args:
        chosen, rejected: [N] scores.
        margins: [N] by how much chosen should lead.
        center: Weight of (chosen + rejected)**2.

    Returns:
        [N], in float32.

    Source: arXiv:2307.09288, equations 1 and 2 (with margin); arXiv:2312.09244, equation 2 (centring).
    """
    chosen, rejected = chosen.float(), rejected.float()
    lead = chosen - rejected
    losses = -F.logsigmoid(lead if margins is None else lead - margins)
    return losses if center is None else losses + center * (chosen + rejected) ** 2


@dataclass(frozen=True, slots=True)
class PairStats:
    """Sums over pairs, which add up over forwards and ranks.

    Args:
        pairs, correct: Number of pairs, and of those whose chosen side scores higher.
        lead: Sum of chosen minus rejected score.
        reward: Sum of all scores.
        raw_tokens: Tokens of all sides, shared ones counted twice.
        lowest, highest: Smallest and largest score.
    """

    pairs: float
    correct: float
    lead: float
    reward: float
    raw_tokens: float
    lowest: float
    highest: float

    def metrics(self) -> dict[str, float]:
        """The metrics of TRL's RewardTrainer, less `num_tokens`."""
        return {
            "min_reward": self.lowest,
            "mean_reward": self.reward / (2 * self.pairs),
            "max_reward": self.highest,
            "accuracy": self.correct / self.pairs,
            "margin": self.lead / self.pairs,
        }


def pair_stats(chosen: torch.Tensor, rejected: torch.Tensor, raw_tokens: int) -> torch.Tensor:
    """[7] the fields of a PairStats on the scores' device, without waiting for it.

    Args:
        chosen, rejected: [N] scores; N may be 0.
        raw_tokens: Tokens of all sides.
    """
    chosen, rejected = chosen.detach().float(), rejected.detach().float()
    scores = torch.cat([chosen, rejected])
    infinity = scores.new_full((1,), torch.inf)
    return torch.stack(
        [
            scores.new_tensor(float(len(chosen))),
            (chosen > rejected).sum().float(),
            (chosen - rejected).sum(),
            scores.sum(),
            scores.new_tensor(float(raw_tokens)),
            torch.cat([scores, infinity]).min(),
            torch.cat([scores, -infinity]).max(),
        ]
    )


def combined(stats: torch.Tensor) -> torch.Tensor:
    """Return one vector [7] for several of `pair_stats`, [K, 7]."""
    return torch.cat([stats[:, :5].sum(dim=0), stats[:, 5:6].amin(dim=0), stats[:, 6:].amax(dim=0)])

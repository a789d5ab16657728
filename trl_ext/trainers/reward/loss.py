"""Loss and statistics of preference pairs. Legend: N pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F

from trl_ext.trainers.reward.data import GAP


def pair_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor | None = None, center: float | None = None
) -> torch.Tensor:
    """Return the loss of every pair of scores, [N] float32: the Bradley-Terry loss, plus a centring penalty.

    Source: arXiv:2307.09288, equations 1 and 2 (with margin); arXiv:2312.09244, equation 2 (centring).

    Args:
        chosen, rejected: [N] scores.
        margins: [N] by how much chosen should lead; None for 0.
        center: The weight of (chosen + rejected)**2; None for 0.
    """
    chosen, rejected = chosen.float(), rejected.float()
    lead = chosen - rejected
    losses = -F.logsigmoid(lead if margins is None else lead - margins)
    return losses if center is None else losses + center * (chosen + rejected) ** 2


@dataclass(frozen=True, slots=True)
class PairStats:
    """Sums over pairs, which can be added over forwards and ranks."""

    pairs: float
    correct: float  # number of pairs whose chosen side scores higher
    lead: float  # sum of chosen minus rejected score
    reward: float  # sum of all scores
    raw_tokens: float  # of all sides, shared tokens counted twice
    lowest: float  # smallest score
    highest: float  # largest score

    def metrics(self) -> dict[str, float]:
        """Return the metrics of TRL's RewardTrainer, without `num_tokens`."""
        return {
            "min_reward": self.lowest,
            "mean_reward": self.reward / (2 * self.pairs),
            "max_reward": self.highest,
            "accuracy": self.correct / self.pairs,
            "margin": self.lead / self.pairs,
        }


def pair_stats(chosen: torch.Tensor, rejected: torch.Tensor, raw_tokens: int) -> torch.Tensor:
    """Return the fields of a PairStats, [7], on the device of the scores [N], without waiting; N may be 0."""
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
    """Combine several results of `pair_stats`, [K, 7], into one vector [7]."""
    return torch.cat([stats[:, :5].sum(dim=0), stats[:, 5:6].amin(dim=0), stats[:, 6:].amax(dim=0)])


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """Scores and lengths of one pair of an evaluation.

    `rule_gap` is the rules' score of chosen minus their score of rejected; None if there is none.
    """

    chosen: float
    rejected: float
    chosen_tokens: int
    rejected_tokens: int
    rule_gap: float | None


def judged(examples: Sequence[Mapping[str, Any]], chosen: torch.Tensor, rejected: torch.Tensor) -> list[JudgedPair]:
    """Return the pairs of a batch with their scores, [N] each."""
    return [
        JudgedPair(c, r, len(example["chosen_ids"]), len(example["rejected_ids"]), example.get(GAP))
        for example, c, r in zip(examples, chosen.tolist(), rejected.tolist(), strict=True)
    ]


def evaluation_metrics(pairs: Sequence[JudgedPair]) -> dict[str, float]:
    """Return metrics over all pairs of an evaluation, without metrics that no pair defines.

    accuracy_rules_agree, accuracy_rules_disagree: accuracy on pairs whose chosen side the rules score higher, lower.
    rules_agree_frac: share of pairs whose chosen side the rules score higher, among pairs with a difference.
    score_length_correlation: Spearman's rank correlation of score and tokens over all sides, -1 to 1.
    """
    metrics = {}
    # Without a gap, or with NaN, the rules prefer neither side.
    agree = [pair for pair in pairs if (pair.rule_gap or 0) > 0]
    disagree = [pair for pair in pairs if (pair.rule_gap or 0) < 0]
    for name, group in (("agree", agree), ("disagree", disagree)):
        if group:
            metrics[f"accuracy_rules_{name}"] = sum(pair.chosen > pair.rejected for pair in group) / len(group)
    if agree or disagree:
        metrics["rules_agree_frac"] = len(agree) / (len(agree) + len(disagree))
    scores = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    tokens = [pair.chosen_tokens for pair in pairs] + [pair.rejected_tokens for pair in pairs]
    correlation = rank_correlation(scores, tokens)
    return metrics if correlation is None else metrics | {"score_length_correlation": correlation}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with ties at their mean rank; None if a or b is constant."""
    value = pd.Series(a, dtype=float).rank().corr(pd.Series(b, dtype=float).rank()) if len(set(a)) > 1 else math.nan
    return None if math.isnan(value) else float(value)

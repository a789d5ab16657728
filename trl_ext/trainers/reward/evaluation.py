"""Metrics of an evaluation beyond TRL's accuracy: does a reward model follow the rules, does it follow length."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from trl_ext.trainers.reward.data import GAP


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """One pair of an evaluation.

    Args:
        chosen, rejected: Scores.
        chosen_tokens, rejected_tokens: Lengths.
        rule_gap: Rules' score of chosen minus that of rejected; None where the rules cannot tell or there are none.
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
    """Metrics over all pairs of an evaluation; those that no pair can tell are left out.

    accuracy_rules_agree, accuracy_rules_disagree: accuracy on pairs whose chosen side the rules score higher, lower.
    rules_agree_frac: share of pairs whose chosen side the rules score higher, among those that they tell apart.
    score_length_correlation: Spearman's rank correlation of score and tokens over all sides, -1 to 1.
    """
    metrics = {}
    agree = [pair for pair in pairs if _gap(pair) > 0]
    disagree = [pair for pair in pairs if _gap(pair) < 0]
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
    """Return Spearman's rank correlation, ties at their mean rank; None where one of the two is constant."""
    value = pd.Series(a, dtype=float).rank().corr(pd.Series(b, dtype=float).rank()) if len(set(a)) > 1 else math.nan
    return None if math.isnan(value) else float(value)


def _gap(pair: JudgedPair) -> float:
    return 0.0 if pair.rule_gap is None or math.isnan(pair.rule_gap) else pair.rule_gap

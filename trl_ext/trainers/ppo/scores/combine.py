"""The score of a completion from rules and reward models.

Legend: B completions of this rank, N of all ranks, R rules, M reward models. NaN means not scored.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from trl_ext.errors import ConfigError
from trl_ext.rewards.totals.moments import Moments

MODES = ("add", "gate")
KINDS = ("none", "running")


def combine(
    rules: torch.Tensor,
    rule_weights: torch.Tensor,
    models: torch.Tensor,
    model_weights: torch.Tensor,
    mode: str,
    gate_above: float = 0.0,
) -> torch.Tensor:
    """Return [B] scores in float32; NaN if nothing scored the completion, with "gate" if no rule did.

    Args:
        rules, models: [B, R] and [B, M] values; NaN is left out of the sums.
        rule_weights, model_weights: [R] and [M].
        mode: "add": weighted sum of rules and models. "gate": the weighted sum of the rules; if it exceeds
            `gate_above`, each model adds its weight times the sigmoid of its value. So with "gate" a completion that
            fails the rules never scores above a completion that passes them.
        gate_above: Sum of the rules that a completion has to exceed.

    Raises:
        ConfigError: for a wrong number of weights, or a negative model weight with "gate".
    """
    if mode == "add":
        both = [_weight(rules, rule_weights, "rules"), _weight(models, model_weights, "reward models")]
        return _sum(torch.stack(both, dim=1))
    if (model_weights < 0).any():
        raise ConfigError(
            f"Reward models have the weights {model_weights.tolist()}. Mode 'gate' takes none below 0: failing the "
            "rules would pay more than passing them."
        )
    score = _weight(rules, rule_weights, "rules")
    bonus = _weight(models.float().sigmoid(), model_weights, "reward models").nan_to_num(nan=0.0)
    return torch.where(passing(rules, rule_weights, gate_above), score + bonus, score)


def passing(rules: torch.Tensor, rule_weights: torch.Tensor, gate_above: float = 0.0) -> torch.Tensor:
    """Return [B] True for completions whose reward models count with mode "gate"."""
    return _weight(rules, rule_weights, "rules") > gate_above


def _weight(values: torch.Tensor, weights: torch.Tensor, what: str) -> torch.Tensor:
    """Return [B] the weighted sum of [B, K] without NaN; NaN if all are NaN."""
    if values.shape[1] != len(weights):
        raise ConfigError(f"{len(weights)} weights for {values.shape[1]} {what}. Give one weight for each.")
    return _sum(values.float() * weights.float())


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return [B] the sum of [B, K] without NaN; NaN if all are NaN."""
    return values.nansum(dim=1).masked_fill(values.isnan().all(dim=1), torch.nan)


@dataclass(slots=True)
class ScoreNormaliser:
    """Normalises a reward model's scores.

    Args:
        kind: "none"; "running": by mean and standard deviation of all scores so far, this batch included.
        clip: Largest absolute value of the result; None for no bound.
    """

    kind: str = "none"
    clip: float | None = None
    _moments: Moments = field(init=False, repr=False, default_factory=Moments)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return [N] normalised scores in float32; "running" first adds them to its moments.

        `scores` [N] are of all ranks, in the same order on each. NaN stays NaN; only finite scores enter the moments.
        """
        values = scores.tolist()
        if self.kind == "running":
            self._moments = self._moments.merged(Moments.of(filter(isfinite, values)))
            values = [self._moments.normalised(value) for value in values]
        result = torch.tensor(values, dtype=torch.float32, device=scores.device)
        return result if self.clip is None else result.clamp(-self.clip, self.clip)

    def state_dict(self) -> dict[str, list[float]]:
        return {"moments": [self._moments.count, self._moments.mean, self._moments.squares]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._moments = Moments(*state["moments"])


class Scoring:
    """One score per completion, from rules and reward models.

    Args:
        num_rules: R; the methods take the weights of the rules first, then of the models.
        models: Called with prompts, completions and a mask [B] of completions to score; return [B].
        normaliser: Copied for each model.
        mode, gate_above: As in `combine`.
    """

    def __init__(
        self,
        num_rules: int,
        models: Sequence[Callable[..., torch.Tensor]],
        normaliser: ScoreNormaliser,
        mode: str,
        gate_above: float,
    ):
        self.num_rules = num_rules
        self._models = models
        self._normalisers = [copy.deepcopy(normaliser) for _ in models]
        self._mode, self._gate_above = mode, gate_above

    def ask_models(
        self, prompts: Sequence[Any], completions: Sequence[Any], rules: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [B, M] raw scores; NaN for completions that fail the rules [B, R] with mode "gate".

        Args:
            prompts, completions: B rows of this process.
            rules: [B, R] rewards of the rules, NaN where a rule abstains.
            weights: [R + M] of rules and models.
        """
        keep = passing(rules, weights[: self.num_rules], self._gate_above) if self._mode == "gate" else None
        columns = [model(prompts, completions, keep).to(rules.device) for model in self._models]
        return torch.stack(columns, dim=1) if columns else rules.new_zeros(len(prompts), 0)

    def scores(self, per_function: torch.Tensor, weights: torch.Tensor, *, is_training: bool) -> torch.Tensor:
        """Return [N] scores, NaN for not scored, of all ranks' values [N, R + M] with weights [R + M].

        The values are of rules, then raw scores of reward models. `is_training=False` keeps running statistics.
        """
        rules, models = per_function[:, : self.num_rules], per_function[:, self.num_rules :]
        normalisers = self._normalisers if is_training else copy.deepcopy(self._normalisers)
        if normalisers:
            columns = zip(normalisers, models.unbind(1), strict=True)
            models = torch.stack([normalise(column) for normalise, column in columns], dim=1)
        own, others = weights[: self.num_rules], weights[self.num_rules :]
        return combine(rules, own, models, others, self._mode, self._gate_above)

    def state_dict(self) -> list[dict[str, Any]]:
        return [normaliser.state_dict() for normaliser in self._normalisers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        for normaliser, own in zip(self._normalisers, state, strict=True):
            normaliser.load_state_dict(own)

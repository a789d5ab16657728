"""Rules and reward models: which of them is asked about which completion, and what score comes of it.

Legend: B completions of this rank, N of all ranks, R rules, M reward models.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_ext.trainers.ppo.scores.combine import ScoreNormaliser, combine, passing


class Scoring:
    """One score per completion, from rules and reward models.

    Args:
        num_rules: R; the weights that the methods take name the rules first.
        models: Called with prompts, completions and which of them to keep; return [B].
        normaliser: Each model's scores have one like it.
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
        """[B, M] raw scores; NaN where rules [B, R] have decided already."""
        keep = passing(rules, weights[: self.num_rules], self._gate_above) if self._mode == "gate" else None
        columns = [model(prompts, completions, keep).to(rules.device) for model in self._models]
        return torch.stack(columns, dim=1) if columns else rules.new_zeros(len(prompts), 0)

    def scores(self, per_function: torch.Tensor, weights: torch.Tensor, *, is_training: bool) -> torch.Tensor:
        """[N] scores of [N, R + M] values; NaN where nothing could score. Evaluation leaves running moments alone."""
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

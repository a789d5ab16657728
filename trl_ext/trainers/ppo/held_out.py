"""What an evaluation on held-out prompts collects: how far the critic's values were from the returns; completions.

Prompts are answered as in training ("sampled") or at `eval_temperature`, and with `eval_greedy` once more at
temperature 0 ("greedy").
"""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trl_ext.rewards.totals.moments import Moments
from trl_ext.trainers.ppo.critic.scale import ValueScale
from trl_ext.trainers.ppo.objective.equations import LEAST_SPREAD, Total, moments, wide

GREEDY, SAMPLED = "greedy", "sampled"
# Of TRL's table beside prompt, completion and rewards: what the rules say of their values.
_EXPLANATIONS = ("rule_trace", "rule_columns")


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """Moments of the returns, and of the returns less the values; those of several batches can be merged."""

    returns: Moments
    errors: Moments

    @classmethod
    def of(cls, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total: Total) -> "ValueErrors":
        """Measure one batch over all ranks. Collective.

        Args:
            values, returns: [B, T] the critic's values and what they should have been.
            mask: [B, T] 1 where a token counts.
            total: Sums a tensor over ranks; called twice.
        """
        pair = torch.stack([wide(returns), wide(returns) - wide(values)])
        count, means, squares = moments(pair, wide(mask).bool(), total)
        pairs = zip(means.nan_to_num().tolist(), squares.tolist(), strict=True)
        return cls(*(Moments(count.item(), mean, square) for mean, square in pairs))

    def merged(self, other: "ValueErrors") -> "ValueErrors":
        """Return the moments of both together."""
        return ValueErrors(self.returns.merged(other.returns), self.errors.merged(other.errors))

    def metrics(self) -> dict[str, float]:
        """Return the explained variance: 1 - Var(return - value) / Var(return).

        It is 1 where the critic foresees all, 0 where it is as good as a constant or returns do not vary, and below 0
        where it is worse.
        """
        returns = self.returns
        varies = returns.squares > returns.count * (LEAST_SPREAD * returns.mean) ** 2
        return {"ppo/explained_variance": 1 - self.errors.squares / returns.squares if varies else 0.0}

    def mean_square(self) -> float:
        """Return the mean squared error over all tokens; 0 without a token."""
        errors = self.errors
        return errors.squares / errors.count + errors.mean**2 if errors.count else 0.0


class HeldOut:
    """An evaluation while it runs.

    Args:
        scale: The critic's in training; this one keeps a copy, so that nothing moves it.
        decoding: "sampled" or "greedy": how prompts are answered first.
        keeps_rows: Somebody wants to see the completions.

    Attributes:
        scale: Of the critic in this evaluation.
        rows: Completions with their scores, as they stand in the table.
    """

    def __init__(self, scale: ValueScale, decoding: str = SAMPLED, *, keeps_rows: bool = False):
        self.scale = copy.copy(scale)
        self.rows: list[dict[str, Any]] = []
        self.keeps_rows = keeps_rows
        self._decoding = decoding
        self._prefix = ""
        self._errors: dict[str, ValueErrors] = {}

    @contextmanager
    def greedily(self) -> Iterator[None]:
        """What is added within the block belongs to greedy completions beside sampled ones."""
        before = self._decoding, self._prefix
        self._decoding, self._prefix = GREEDY, f"{GREEDY}_"
        yield
        self._decoding, self._prefix = before

    def add(self, errors: ValueErrors) -> None:
        """Take a batch's errors of the critic."""
        before = self._errors.get(self._prefix)
        self._errors[self._prefix] = errors if before is None else before.merged(errors)

    def metrics(self) -> dict[str, float]:
        """Return the critic's metrics over all batches."""
        found: dict[str, float] = {}
        for prefix, errors in self._errors.items():
            loss = 0.5 * errors.mean_square() / self.scale.std**2
            metrics = errors.metrics() | {"loss/value_avg": loss}
            found |= {f"{prefix}{name}": value for name, value in metrics.items()}
        return found

    def add_rows(self, logs: Mapping[str, Any], scores: Sequence[float], step: int) -> None:
        """Take a batch's completions.

        Args:
            logs: TRL's, with this batch alone.
            scores: [N] in their order, NaN where nothing could score.
            step: The optimizer step.
        """
        columns = {f"rewards/{name}": values for name, values in logs["rewards"].items()}
        # Two sets of rules write into one column, which then belongs to no completion.
        there = {name: logs["extra"].get(name, ()) for name in _EXPLANATIONS}
        columns |= {name: values for name, values in there.items() if len(values) == len(scores)}
        for place, score in enumerate(scores):
            self.rows.append(
                {
                    "step": step,
                    "decoding": self._decoding,
                    "prompt": logs["prompt"][place],
                    "completion": logs["completion"][place],
                    "score": score,
                    **{name: values[place] for name, values in columns.items()},
                }
            )

    def write(self, path: Path) -> None:
        """Write the completions as a file of JSON lines, one a completion; numbers that are not finite as null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({k: _finite(v) for k, v in row.items()}, default=str) for row in self.rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def empty_logs() -> dict[str, Any]:
    """Return what TRL notes completions in, without the bound that TRL's own has."""
    lists = ("images", "prompt", "completion", "advantages")
    return {**{name: [] for name in lists}, "rewards": defaultdict(list), "extra": defaultdict(list)}


def extend_logs(logs: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Add a batch's notes to TRL's."""
    for name, values in others.items():
        if isinstance(values, Mapping):
            extend_logs({one: logs[name][one] for one in values}, values)
        else:
            logs[name].extend(values)

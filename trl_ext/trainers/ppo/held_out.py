"""Results of an evaluation on held-out prompts: errors of the critic's values, and completions.

Completions are sampled as in training or at `eval_temperature` ("sampled"); with `eval_greedy` each prompt also gets a
completion at temperature 0 ("greedy").
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
_EXPLANATIONS = ("rule_trace", "rule_columns")  # columns in TRL's table that explain the rules' values


@dataclass(frozen=True, slots=True)
class ValueErrors:
    """Moments of the returns, and of the returns less the values; several batches can be merged."""

    returns: Moments
    errors: Moments

    @classmethod
    def of(cls, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total: Total) -> "ValueErrors":
        """Measure a batch of values and returns, [B, T] each, over the counted tokens of all ranks. Collective.

        `total` sums a tensor over ranks, and is called twice.
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

        It is 1 for a perfect critic, 0 for a constant or if returns do not vary, and below 0 for a worse critic.
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
        scale: The critic's scale in training; the evaluation uses a copy.
        decoding: Decoding outside `greedily`: "sampled" or "greedy".
        keeps_rows: True if the completions are shown or written.

    Attributes:
        rows: Completions with their scores, as in the table.
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
        """Count errors and rows added within the block as greedy."""
        before = self._decoding, self._prefix
        self._decoding, self._prefix = GREEDY, f"{GREEDY}_"
        yield
        self._decoding, self._prefix = before

    def add(self, errors: ValueErrors) -> None:
        """Add a batch's errors of the critic."""
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
        """Add a batch's completions from TRL's logs of this batch, with scores [N], NaN for not scored."""
        columns = {f"rewards/{name}": values for name, values in logs["rewards"].items()}
        # If two rule sets write into a column, its values do not match the completions.
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
        """Write the completions as JSON lines, with null for numbers that are not finite."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({k: _finite(v) for k, v in row.items()}, default=str) for row in self.rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def empty_logs() -> dict[str, Any]:
    """Return an empty table of completions as in TRL, without TRL's limit on its length."""
    lists = ("images", "prompt", "completion", "advantages")
    return {**{name: [] for name in lists}, "rewards": defaultdict(list), "extra": defaultdict(list)}


def extend_logs(logs: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Append the rows of a batch's table to TRL's table."""
    for name, values in others.items():
        if isinstance(values, Mapping):
            extend_logs({one: logs[name][one] for one in values}, values)
        else:
            logs[name].extend(values)

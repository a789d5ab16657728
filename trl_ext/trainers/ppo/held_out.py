"""What one evaluation on held-out prompts collects: the critic's errors, and completions for the report.

Prompts are answered as in training ("sampled") or at `eval_temperature`, and with `eval_greedy` once more at
temperature 0 ("greedy").
"""

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_ext.trainers.ppo.critic.errors import ValueErrors
from trl_ext.trainers.ppo.critic.scale import ValueScale

GREEDY, SAMPLED = "greedy", "sampled"
# Of TRL's table beside prompt, completion and rewards: what the rules say of their values.
_EXPLANATIONS = ("rule_trace", "rule_columns")


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

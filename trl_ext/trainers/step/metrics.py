"""Metrics of the forwards of an optimizer step, merged over forwards and ranks.

TRL's loss logs means over the rows of a call, over all ranks, with several collectives each time. Forwards have
different numbers of tokens and rows, so each records its values with their weights, and the step merges them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.compat.swap import swapped
from trl_ext.trainers.step.plan import SkippedRows
from trl_ext.trainers.step.rows import counted_tokens
from trl_ext.trainers.step.trainer import StepTrainer

# Metrics that are 0 for a row without advantage, whether it is forwarded or not.
_CLIPPED = ("clip_ratio/", "cispo_clip_ratio")
NO_VALUE = float("-inf")  # below every largest value


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A metric's value of one forward on this rank.

    Args:
        name: TRL's key or ours.
        value: [].
        weight: In the mean over forwards and ranks; None: the forwards' values are summed, then averaged over ranks.
        by_row: Whether the weight counts rows; else it counts tokens.
    """

    name: str
    value: Any
    weight: Any
    by_row: bool = False


@contextmanager
def capture_metrics(trainer: StepTrainer, rollouts: dict[str, Any]) -> Iterator[None]:
    """Record the values that TRL's loss logs inside the block, as samples of a forward of these rows."""
    logged: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}

    def own(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    # As if there were no other ranks.
    alone = swapped(trainer.accelerator, gather=own, gather_for_metrics=own, reduce=own)
    with alone, swapped(trainer, _metrics=logged):
        yield
    num_tokens = counted_tokens(rollouts).sum().item()
    num_rows = len(rollouts["completion_ids"]) if num_tokens else 0
    is_by_row = trainer.importance_sampling_level == "sequence" and rollouts["advantages"].ndim == 1
    for name, (value,) in logged["train"].items():
        by_row = name == "vespo/phi_seq_mean" or (is_by_row and name.startswith(_CLIPPED))
        trainer.counts.samples.append(MetricSample(name, value, num_rows if by_row else num_tokens, by_row))


def merge_metrics(stats: Sequence[Any], accelerator: Any, copies: int = 1) -> dict[str, float]:
    """Return one value for each metric; 0, as in TRL, if no rank has a weight for it. Collective.

    Args:
        stats: This rank's `MetricSample` and `SkippedRows`, with equal names on all ranks.
        accelerator: The trainer's.
        copies: Number of ranks that record the same value of the same forward.
    """
    skipped = [one for one in stats if isinstance(one, SkippedRows)]
    not_forwarded = sum((one.not_forwarded for one in skipped), start=torch.zeros(2, device=accelerator.device))
    result = _skipped_metrics(skipped)
    by_name: dict[str, list[MetricSample]] = defaultdict(list)
    for one in stats:
        if isinstance(one, MetricSample):
            by_name[one.name].append(one)
    metrics = [_Metric(name, by_name[name], not_forwarded) for name in sorted(by_name)]
    if not metrics:
        return result
    sums = torch.stack([one.sum_and_weight(accelerator, copies) for one in metrics])
    totals = accelerator.reduce(sums, reduction="sum").tolist()
    extremes = torch.tensor([[one.extreme() for one in metrics]], device=accelerator.device)
    largest = accelerator.gather(extremes).amax(dim=0).tolist()
    for metric, (total, weight), extreme in zip(metrics, totals, largest, strict=True):
        if metric.sign:
            result[metric.name] = 0.0 if extreme == NO_VALUE else metric.sign * extreme
        else:
            result[metric.name] = total / weight if weight else 0.0
    return result


def _skipped_metrics(skipped: Sequence[SkippedRows]) -> dict[str, float]:
    """Return the metrics of rows that were left out; empty if none could be."""
    if not skipped:
        return {}
    return {
        "packing/skipped_rows_frac": sum(one.num_rows for one in skipped) / sum(one.num_all for one in skipped),
        "packing/skipped_tokens": float(sum(one.num_tokens for one in skipped)),
    }


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric's samples on this rank.

    Args:
        name: TRL's key or ours.
        samples: At least one.
        not_forwarded: [2] tokens and rows that were not forwarded: they count as 0 in `_CLIPPED`.
    """

    name: str
    samples: Sequence[MetricSample]
    not_forwarded: torch.Tensor

    @property
    def left_out(self) -> torch.Tensor:
        """[] tokens that were not forwarded, or rows if the samples' weights count rows."""
        return self.not_forwarded[int(self.samples[0].by_row)]

    @property
    def sign(self) -> int:
        """-1 for a smallest value, 1 for a largest, 0 for a mean."""
        return -1 if self.name.endswith("_min") else int(self.name.endswith("_max"))

    @property
    def is_mean(self) -> bool:
        """True for a mean over tokens or rows, False for a sum over forwards."""
        return self.samples[0].weight is not None

    def sum_and_weight(self, accelerator: Any, copies: int) -> torch.Tensor:
        """Return [2] the weighted sum and its weight, to be added over ranks."""
        total = weight = 0.0
        for one in self._counted():
            own = 1.0 if one.weight is None else one.weight
            total, weight = total + one.value * own, weight + own
        if not self.is_mean:
            weight = copies
        both = torch.stack([_number(total, accelerator), _number(weight, accelerator)]) / copies
        if self.is_mean and self.name.startswith(_CLIPPED):
            both[1] += self.left_out
        return both

    def extreme(self) -> float:
        """Return the largest value, of a smallest value the largest negative; `NO_VALUE` if none is a number."""
        values = [float(one.value) for one in self._counted()]
        if self.name.startswith(_CLIPPED) and float(self.left_out) > 0:
            values.append(0.0)
        known = [value for value in values if not math.isnan(value)]
        return max(((self.sign or 1) * value for value in known), default=NO_VALUE)

    def _counted(self) -> list[MetricSample]:
        return [one for one in self.samples if one.weight is None or one.weight > 0]


def _number(value: Any, accelerator: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=accelerator.device).detach()

"""Metrics of the forwards of an optimizer step, merged over forwards and ranks.

TRL's loss logs means over the rows of a call, over all ranks, with several collectives each time. Forwards have
different numbers of tokens and rows, so each records its values with their weights, and the step merges them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.compat.swap import swapped
from trl_ext.trainers.step.plan import SkippedRows
from trl_ext.trainers.step.rows import counted_tokens

# Metrics that are 0 for a row without advantage, whether it is forwarded or not.
_CLIPPED = ("clip_ratio/", "cispo_clip_ratio")


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A metric's value of one forward on this rank.

    Args:
        name: TRL's key or ours.
        value: [].
        weight: In the mean over forwards and ranks; None: the forwards' values are summed, then averaged over ranks.
    """

    name: str
    value: Any
    weight: Any


@contextmanager
def capture_metrics(trainer: Any, rollouts: dict[str, Any]) -> Iterator[None]:
    """Record the values that TRL's loss logs inside the block, as samples of a forward of these rows."""
    logged: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}

    def own(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    alone = {"gather": own, "gather_for_metrics": own, "reduce": own}  # as if there were no other ranks
    with swapped(trainer.accelerator, **alone), swapped(trainer, _metrics=logged):
        yield
    num_tokens = counted_tokens(rollouts).sum().item()
    num_rows = len(rollouts["completion_ids"]) if num_tokens else 0
    is_by_row = trainer.importance_sampling_level == "sequence" and rollouts["advantages"].ndim == 1
    for name, (value,) in logged["train"].items():
        by_row = name == "vespo/phi_seq_mean" or (is_by_row and name.startswith(_CLIPPED))
        trainer.counts.samples.append(MetricSample(name, value, num_rows if by_row else num_tokens))


def merged(stats: Sequence[Any], accelerator: Any, copies: int = 1) -> dict[str, float]:
    """Return one value for each metric; 0, as in TRL, if no rank has a weight for it. Collective.

    `stats` are this rank's `MetricSample` and `SkippedRows`, with equal names on all ranks. `copies` is the number of
    ranks that record the same value of the same forward.
    """
    skipped = [one for one in stats if isinstance(one, SkippedRows)]
    tokens_skipped = sum((one.tokens for one in skipped), start=torch.zeros((), device=accelerator.device))
    by_name: dict[str, list[MetricSample]] = defaultdict(list)
    for one in stats:
        if isinstance(one, MetricSample):
            by_name[one.name].append(one)
    result = {}
    if skipped:
        result["packing/skipped_rows_frac"] = sum(one.num_rows for one in skipped) / sum(s.num_all for s in skipped)
        result["packing/skipped_tokens"] = float(sum(one.num_tokens for one in skipped))
    names = sorted(by_name)
    if not names:
        return result
    sums, extremes = [], []
    for name in names:
        ours = by_name[name]
        is_clipped = name.startswith(_CLIPPED)
        pairs = [
            (one.value, 1.0 if one.weight is None else one.weight)
            for one in ours
            if one.weight is None or one.weight > 0
        ]
        total = sum(value * weight for value, weight in pairs)
        weight = copies if ours[0].weight is None else sum(weight for _, weight in pairs)
        sums.append(torch.stack([_number(total, accelerator), _number(weight, accelerator)]) / copies)
        if is_clipped and ours[0].weight is not None:
            sums[-1][1] += tokens_skipped
        # Rows that were left out count as 0 in the smallest and largest value.
        values = [float(value) for value, _ in pairs] + [0.0] * (is_clipped and float(tokens_skipped) > 0)
        sign = -1.0 if name.endswith("_min") else 1.0
        extremes.append(max((sign * value for value in values if value == value), default=float("-inf")))
    totals = accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
    largest = accelerator.gather(torch.tensor([extremes], device=accelerator.device)).amax(dim=0).tolist()
    for name, (total, weight), extreme in zip(names, totals, largest, strict=True):
        if name.endswith(("_min", "_max")):
            known = 0.0 if extreme == float("-inf") else extreme
            result[name] = -known if name.endswith("_min") else known
        else:
            result[name] = total / weight if weight else 0.0
    return result


def _number(value: Any, accelerator: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=accelerator.device).detach()

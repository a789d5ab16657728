"""The packing self-check of a causal model with TRL's fused head, or of a critic: rows scored in three ways."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from trl_ext.packing.check import CheckResult, Probe, check
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.calls import right_padded
from trl_ext.trainers.forward.completions import Unpadded, plan, score, score_values
from trl_ext.trainers.forward.roles import CRITIC


def check_causal_model(
    model: Any,
    config: Any,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
    of_critic: bool = False,
    group: SequenceGroup | None = None,
) -> CheckResult:
    """Score a few short rows alone, padded and packed; collective under ZeRO-3.

    Args:
        model: With packed attention installed, wrapped as training will call it, in evaluation mode.
        config: The model's, of its text part.
        device: Where the model's inputs go.
        autocast: Makes the context in which training calls the model.
        half_precision: Whether weights or autocast are in bfloat16 or float16.
        share_prompt: As training will plan.
        of_critic: True to compare a critic's values, not a policy's log-probabilities.
        group: Processes that share the packed rows, as in training.
    """

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        rows = plan(batch, share_prompt)
        with autocast():
            if of_critic:
                numbers, _ = score_values(model, batch, rows, device, group=group, role=CRITIC)
            else:
                numbers = score(model, batch, rows, device, group=group).logps
        return [row[:n] for row, n in zip(numbers, batch.num_scored, strict=True)]

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        ids, mask = right_padded([one.tolist() for one in batch.sequences], 0, device)
        with autocast():
            if of_critic:
                numbers = model(input_ids=ids, attention_mask=mask, use_cache=False, role=CRITIC).token_values
            else:
                labels = ids.masked_fill(mask == 0, -100)
                numbers = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        ends = zip(numbers, batch.sequences, batch.num_scored, strict=True)
        # The head shifts: what belongs to token t stands at t - 1.
        return [row[len(s) - 1 - n : len(s) - 1] for row, s, n in ends]

    what = "values" if of_critic else "log-probabilities"
    return check(lambda probe: padded([probe])[0], padded, packed, config, half_precision, what)


def _unpadded(probes: list[Probe]) -> Unpadded:
    return Unpadded(
        sequences=Ragged.of([p.prompt + p.completion for p in probes]),
        num_scored=np.array([len(p.completion) for p in probes]),
        width=max(len(p.completion) for p in probes),
    )

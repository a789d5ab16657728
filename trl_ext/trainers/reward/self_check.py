"""The packing self-check of a reward model: scores the same sequences alone, padded and packed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trl_ext.packing.check import CheckResult, Probe, check
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.calls import calls_of, right_padded
from trl_ext.trainers.forward.pairs import pair_row
from trl_ext.trainers.forward.pooled_head import pooled_scores, scored_token, tokens_here, whole


def check_reward_model(
    model: Any,
    head: torch.nn.Module,
    config: Any,
    pad_token_id: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
    group: SequenceGroup | None = None,
) -> CheckResult:
    """Score a few short sequences alone, padded and packed as pairs, and compare. Collective under ZeRO-3.

    The head's scores and its inputs are compared, as a fresh head may be all zeros.

    Args:
        model: The model with packed attention and pooled head, wrapped as in training, in evaluation mode.
        head: Its layer `score`.
        config: The config of the model's text part.
        half_precision: True if weights or autocast are in bfloat16 or float16.
        group: Processes that share the packed rows, as in training.
    """

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        sequences = [probe.prompt + probe.completion for probe in probes]
        ids, mask = right_padded(sequences, pad_token_id, device)
        with autocast(), calls_of(head) as seen:
            scores = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        ends = [scored_token(s, pad_token_id) for s in sequences]
        (states, *_), _ = seen[-1]
        return _numbers([hidden[end] for hidden, end in zip(states, ends, strict=True)], scores)

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        sides = [list(probe.prompt + probe.completion) for probe in probes]
        pairs = [{"chosen_ids": c, "rejected_ids": r} for c, r in zip(sides[0::2], sides[1::2], strict=True)]
        row = pair_row(pairs, share_prompt, pad_token_id).to(device)
        with autocast(), calls_of(head) as seen:
            scores = pooled_scores(model, row.flat, row.pool_index, group)
        (states, *_), _ = seen[-1]
        states = whole(states, tokens_here(row.flat, row.pool_index, group), len(scores), group)
        numbers = _numbers(list(states), scores)
        # The row holds the ends of all chosen sides, then of all rejected sides.
        return [numbers[(i // 2) + (i % 2) * len(pairs)] for i in range(len(sides))]

    return check(lambda probe: padded([probe])[0], padded, packed, config, half_precision, what="scores")


def _numbers(hidden: list[torch.Tensor], scores: torch.Tensor) -> list[torch.Tensor]:
    """Return for each sequence its pooled hidden state, divided by its root mean square, and its score."""
    return [
        torch.cat([h.float() / h.float().square().mean().sqrt().clamp(min=1e-12), s.float()])
        for h, s in zip(hidden, scores, strict=True)
    ]

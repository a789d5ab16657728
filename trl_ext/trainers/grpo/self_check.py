"""The packing self-check, asked of a causal model with TRL's fused head: the three ways to score the same rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trl_ext.packing.check import CheckResult, Probe, check
from trl_ext.trainers.forward.completions import Unpadded, plan, score, score_values
from trl_ext.trainers.forward.roles import CRITIC


def check_causal_model(
    model: Any,
    vocab_size: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
) -> CheckResult:
    """Score a few short rows alone, padded and packed; collective under ZeRO-3.

    Args:
        model: With packed attention installed, wrapped as training will call it, in evaluation mode.
        vocab_size: Tokens are drawn below it.
        device: Where the model's inputs go.
        autocast: Makes the context in which training calls the model.
        half_precision: Whether weights or autocast are in bfloat16 or float16.
        share_prompt: As training will plan.
    """

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        with autocast():
            logps = score(model, batch, plan(batch, share_prompt), device).logps
        return [row[:n] for row, n in zip(logps, batch.num_scored, strict=True)]

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        ids, mask = _right_padded(batch, device)
        with autocast():
            labels = ids.masked_fill(mask == 0, -100)
            logps = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        ends = zip(logps, batch.sequences, batch.num_scored, strict=True)
        # The head shifts: the value of token t stands at t - 1.
        return [row[len(s) - 1 - n : len(s) - 1] for row, s, n in ends]

    return check(lambda probe: padded([probe])[0], padded, packed, vocab_size, half_precision)


def check_values(
    model: Any,
    vocab_size: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
) -> CheckResult:
    """Compare a critic's values of a few short rows alone, padded and packed. Arguments as in `check_causal_model`."""

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        with autocast():
            values, _ = score_values(model, batch, plan(batch, share_prompt), device, role=CRITIC)
        return [row[:n] for row, n in zip(values, batch.num_scored, strict=True)]

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes)
        ids, mask = _right_padded(batch, device)
        with autocast():
            values = model(input_ids=ids, attention_mask=mask, use_cache=False, role=CRITIC).token_values
        ends = zip(values, batch.sequences, batch.num_scored, strict=True)
        return [row[len(s) - 1 - n : len(s) - 1] for row, s, n in ends]

    return check(lambda probe: padded([probe])[0], padded, packed, vocab_size, half_precision, what="values")


def _unpadded(probes: list[Probe]) -> Unpadded:
    return Unpadded(
        sequences=tuple(p.prompt + p.completion for p in probes),
        num_scored=tuple(len(p.completion) for p in probes),
        width=max(len(p.completion) for p in probes),
    )


def _right_padded(batch: Unpadded, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, [B, longest]. On the right: padding on the left shifts learned positions."""
    longest = max(map(len, batch.sequences))
    ids = [s + (0,) * (longest - len(s)) for s in batch.sequences]
    mask = [(1,) * len(s) + (0,) * (longest - len(s)) for s in batch.sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

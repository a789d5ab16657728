"""The critic's loss. Legend: B rows, T completion tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Of one micro-batch; both add up over micro-batches and ranks.

    Args:
        loss: [] with gradient.
        num_clipped: [] counted tokens whose clipped term is the larger one: they give no gradient.
    """

    loss: torch.Tensor
    num_clipped: torch.Tensor


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float | None,
    normalizer: torch.Tensor | float,
) -> ValueLoss:
    """Half the squared error, of the value or of the value clipped to near its old one, whichever is larger.

    Args:
        values: [B, T] the critic's values now.
        old_values: [B, T] its values when the completions were sampled.
        returns: [B, T] what the values should be.
        mask: [B, T] 1 where a token counts; what stands elsewhere, NaN included, reaches neither loss nor gradient.
        cliprange_value: How far from its old value a value may go before it is clipped; None never clips.
        normalizer: What the sum over tokens is divided by, above 0: the counted tokens of the whole batch.

    Source: OpenAI baselines, ppo2/model.py; arXiv:2005.12729, section 3, item 1 (value function clipping).
    """
    counted = mask.bool()
    # Before the arithmetic: the gradient of a NaN that is masked afterwards is NaN.
    values, old_values, returns = (torch.where(counted, x.float(), 0.0) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if cliprange_value is None:
        return ValueLoss(0.5 * errors.sum() / normalizer, counted.new_zeros((), dtype=torch.long))
    clipped = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    clipped_errors = (clipped - returns).square()
    loss = 0.5 * torch.maximum(errors, clipped_errors).sum() / normalizer
    return ValueLoss(loss, (clipped_errors > errors).sum())

"""A loss whose gradient is computed at once, so that nothing of its graph waits for the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled


def can_settle(trainer: Any) -> bool:
    """True if gradients can be had outside the trainer's backward pass: not under ZeRO-3 and FSDP, whose weights are
    there in a pass alone, and not with fp16's scaled losses."""
    return not (is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled or trainer.args.fp16)


def settled(loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the loss with its gradient in place of its graph: the backward pass hands it to the parameters, times
    what arrives there, so that engines reduce and scale it as any other.

    Args:
        loss: A scalar of the parameters alone.
        parameters: Trained weights.
    """
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = [
        (parameter, gradient) for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None
    ]
    return _Settled.apply(loss.detach(), len(pairs), *(p for p, _ in pairs), *(g for _, g in pairs))


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, num: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[num:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, arriving: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return (
            None,
            None,
            *(gradient * arriving.to(gradient.dtype) for gradient in gradients),
            *(None for _ in gradients),
        )

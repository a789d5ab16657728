"""Several backward passes where the training loop knows of one, and gradients computed before the backward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_ext.compat.swap import swapped


@contextmanager
def gradients_unsynced(accelerator: Any, model: Any) -> Iterator[None]:
    """Inside the block a backward pass is not the last of the optimizer step, for DDP, DeepSpeed and FSDP2.

    Args:
        accelerator: The trainer's Accelerator.
        model: The wrapped model, as training calls it.
    """
    state = accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(False)
    reduces = state.plugin_kwargs.get("sync_each_batch") or accelerator.distributed_type == DistributedType.DEEPSPEED
    try:
        with nullcontext() if reduces else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)


@contextmanager
def backward_where_there_is_one(trainer: Any) -> Iterator[None]:
    """Inside the block the loss of a micro-step without forwards does not go backward; any other needs a gradient."""
    accelerator = trainer.accelerator
    plain = accelerator.backward

    def backward(loss: torch.Tensor, **options: Any) -> None:
        if loss.requires_grad or trainer.forward_loop.has_forwards:
            plain(loss, **options)

    with swapped(accelerator, backward=backward):
        yield


def keep_gradients_in_buckets(accelerator: Any) -> None:
    """Let DDP's gradients live in the buckets that it sends, instead of a second time beside them.

    Saves 4 bytes for each trained fp32 weight; the numbers are the same. It is off in accelerate, and no argument of
    the Trainer. Called before the model is prepared.
    """
    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler.gradient_as_bucket_view = True


def reduce_every_backward(accelerator: Any) -> None:
    """Let every backward pass reduce its gradients to this process's share under FSDP2, as ZeRO-3 does.

    Left to the last pass of an optimizer step, as in accelerate, the others leave all gradients whole on every card: 2
    bytes for each trained weight. Called before training starts.
    """
    if accelerator.is_fsdp2:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


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

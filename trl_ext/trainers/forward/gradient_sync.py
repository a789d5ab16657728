"""Several backwards in one micro-step of the training loop, and gradients computed before the backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_ext.compat.swap import swapped


@contextmanager
def gradients_unsynced(accelerator: Any, model: Any) -> Iterator[None]:
    """Mark backwards inside the block as not the last of the optimizer step, for DDP, DeepSpeed and FSDP2.

    `model` is the wrapped model, as training calls it.
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


class ForwardsOfStep(Protocol):
    """The forwards of the running micro-step."""

    @property
    def has_forwards(self) -> bool: ...


@contextmanager
def backward_where_there_is_one(accelerator: Accelerator, forwards: ForwardsOfStep) -> Iterator[None]:
    """Skip the backward of a micro-step without forwards inside the block; any other loss needs a gradient."""
    plain = accelerator.backward

    def backward(loss: torch.Tensor, **options: Any) -> None:
        if loss.requires_grad or forwards.has_forwards:
            plain(loss, **options)

    with swapped(accelerator, backward=backward):
        yield


class SettlingTrainer(Protocol):
    """A trainer of any kind.

    Args:
        args: Its config.
        is_fsdp_enabled: Whether FSDP shards the weights.
    """

    args: Any
    is_fsdp_enabled: bool


def can_settle(trainer: SettlingTrainer) -> bool:
    """Return True if gradients can be computed outside the trainer's backward.

    They cannot under ZeRO-3 and FSDP, which gather weights only during a pass, nor with fp16's scaled losses.
    """
    return not (is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled or trainer.args.fp16)


def settled(loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the loss with its gradient already computed and its graph freed.

    The backward multiplies the gradient by the incoming gradient and passes it to the parameters, so that engines
    reduce and scale it like any other. `loss` is a scalar that depends on nothing but `parameters`.
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

"""Several backward passes where the training loop knows of one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType

from trl_ext.compat.swap import swapped


@contextmanager
def gradients_unsynced(accelerator: Any, model: Any) -> Iterator[None]:
    """Inside the block a backward pass is not the last of the optimizer step, for DDP and for DeepSpeed.

    Args:
        accelerator: The trainer's Accelerator.
        model: The wrapped model, as training calls it.
    """
    state = accelerator.gradient_state
    before = state.sync_gradients
    state._set_sync_gradients(False)
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    try:
        with nullcontext() if is_deepspeed else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)


@contextmanager
def backward_where_there_is_one(accelerator: Any) -> Iterator[None]:
    """Inside the block a loss without gradient, that of a micro-step without forwards, does not go backward."""
    plain = accelerator.backward

    def backward(loss: torch.Tensor, **options: Any) -> None:
        if loss.requires_grad:
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

"""Continuous batching of transformers for generation (`use_transformers_continuous_batching`), beside training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_ext.compat.swap import swapped


@contextmanager
def beside_training(model: torch.nn.Module, accelerator: Any) -> Iterator[None]:
    """Let the model generate inside the block, and be trained as before after it."""
    with _dtypes_kept(model), _outputs_uncast(model, accelerator):
        yield


@contextmanager
def _dtypes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put parameters and buffers back that were cast inside the block; until then both copies stand in memory.

    TRL casts the whole model to `bf16` or `fp16` for continuous batching and leaves it so: weights that were loaded in
    float32 are trained in half precision from then on, and the frequencies of rotary embeddings lose their digits.
    """
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    try:
        yield
    finally:
        for parameter, data in weights:
            if parameter.dtype != data.dtype:
                parameter.data = data
        for module, name, buffer in buffers:
            now = module._buffers[name]
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                module._buffers[name] = buffer


@contextmanager
def _outputs_uncast(model: torch.nn.Module, accelerator: Any) -> Iterator[None]:
    """Leave out accelerate's cast of outputs to float32 inside the block; mixed precision stays.

    Issue: the outputs of transformers 5.24 hold the paged cache, which accelerate takes for a half-precision tensor.
    Fixed in: no version of accelerate up to 1.15.
    Remove when: accelerate casts tensors alone, or transformers keeps the cache out of the outputs.
    """
    forward = vars(model).get("_original_forward")
    if forward is None:  # accelerate has wrapped nothing: no mixed precision, or an adapter's model around this one
        yield
        return

    def uncast(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():  # of the thread that generates
            return forward(*args, **kwargs)

    with swapped(model, forward=uncast):
        yield

"""Continuous batching of transformers for generation (`use_transformers_continuous_batching`), beside training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def dtypes_kept(model: torch.nn.Module) -> Iterator[None]:
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

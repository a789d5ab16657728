"""DeepSpeed: a second engine beside the one that accelerate prepares. Imported when it is used: it is optional."""

import copy
from typing import Any

import torch
from accelerate import Accelerator


def make_engine(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, max_grad_norm: float
) -> Any:
    """Return an engine of its own for a second trained model, with the settings of the first one but its clip norm.

    Accelerate prepares one model only; `accelerator.backward` belongs to that one.
    """
    import deepspeed
    from accelerate.utils import map_pytorch_optim_to_deepspeed

    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    place = config["zero_optimization"].get("offload_optimizer") or {}
    if place.get("device", "none") != "none" and config.get("zero_force_ds_cpu_optimizer", True):
        optimizer = map_pytorch_optim_to_deepspeed(optimizer)  # as accelerate does for its one model
    config["gradient_clipping"] = max_grad_norm
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def backward(engine: Any, loss: torch.Tensor, *, is_last: bool) -> None:
    """Go backward on an engine; it takes its optimizer step where `is_last` ends an accumulation."""
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss, scale_wrt_gas=False)
    if is_last:
        engine.step()

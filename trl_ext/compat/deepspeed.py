"""DeepSpeed: a second engine in addition to accelerate's. DeepSpeed is optional, and imported when it is used."""

import copy
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator


def announce_builds() -> None:
    """Let one process of each machine print when DeepSpeed begins to compile a helper, which takes minutes."""
    if "deepspeed" not in sys.modules and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    @functools.wraps(load)
    def announced(self: Any, verbose: bool = True) -> Any:
        from torch.utils.cpp_extension import _get_build_directory  # needs setuptools, as every build does

        is_built = any(Path(_get_build_directory(self.name, verbose=False)).glob("*.so"))
        if not is_built and os.environ.get("LOCAL_RANK", "0") == "0":
            what = f"DeepSpeed compiles its helper '{self.name}', once for this machine: it may take minutes."
            print(what, file=sys.stderr, flush=True)
        return load(self, verbose)

    if not hasattr(load, "__wrapped__"):
        OpBuilder.jit_load = announced


def make_groups_once() -> None:
    """Let ZeRO-3 with `zero_hpz_partition_size` load a second model, such as a reference model.

    Issue: DeepSpeed makes the groups for every model that is loaded, and asserts that there are none.
    Fixed in: no version up to 0.19.8.
    Remove when: `_create_zero_param_parallel_group` returns if there are groups.
    """
    from deepspeed.utils import groups

    create = groups._create_zero_param_parallel_group

    @functools.wraps(create)
    def created(group_size: int) -> None:
        if groups._get_zero_param_intra_parallel_group() is None:
            create(group_size)

    if not hasattr(create, "__wrapped__"):
        groups._create_zero_param_parallel_group = created


def make_engine(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, max_grad_norm: float
) -> Any:
    """Return a separate engine for a second trained model, with the first engine's settings except the clip norm.

    Accelerate prepares one model only, and `accelerator.backward` belongs to it.

    Args:
        model, optimizer: The second model, not wrapped yet, and the optimizer of its weights.
        accelerator: It has prepared the first model.
        max_grad_norm: Norm to which the second model's gradients are clipped; 0 for no limit.
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
    """Run the backward pass on an engine, and its optimizer step if `is_last` ends an accumulation."""
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss, scale_wrt_gas=False)
    if is_last:
        engine.step()

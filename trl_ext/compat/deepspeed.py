"""DeepSpeed: a second engine beside the one that accelerate prepares. Imported when it is used: it is optional."""

import copy
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator


def announce_builds() -> None:
    """Have one process of each machine say when DeepSpeed begins to compile a helper, which takes minutes."""
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
    """Let ZeRO-3 with `zero_hpz_partition_size` load a second model, such as a reference, as it loads the first.

    Issue: DeepSpeed makes the groups for every model that is loaded, and asserts that there are none.
    Fixed in: no version up to 0.19.8.
    Remove when: `_create_zero_param_parallel_group` returns where there are groups.
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

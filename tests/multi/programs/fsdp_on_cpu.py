"""What a test runs first in each process, so that the shipped FSDP files shard on CPUs.

accelerate takes its FSDP plugin for cards only: with `use_cpu` it trains under DDP without a warning. Here its state
reports that it shards, and torch's `fully_shard` does so over gloo. The file that `SHARDED` names gets what lies on
process 0 in the last step.
"""

import json
import os
from pathlib import Path

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

plain_init, plain_prepare = AcceleratorState.__init__, accelerate.accelerator.fsdp2_prepare_model


def init(self, *args, fsdp_plugin=None, **kwargs) -> None:
    plain_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):  # pages are pinned for a card
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def prepare(accelerator, model):
    model = plain_prepare(accelerator, model)
    if accelerator.is_main_process and "SHARDED" in os.environ:
        register_optimizer_step_pre_hook(lambda optimizer, *_: note(model, optimizer))
    model.set_requires_gradient_sync = reduces
    return model


def note(model, optimizer) -> None:
    """Write what lies on this process in the step: shares of weights, and bytes by term of the planner."""
    weights = [p for p in model.parameters() if isinstance(p, DTensor)]
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if value.ndim]
    terms = {
        "policy weights": weights,
        "gradients": [p.grad for p in weights if p.grad is not None],
        "optimizer": state,
    }
    found = {term: sum(one.to_local().nbytes for one in tensors) for term, tensors in terms.items()}
    found["shares"] = [p.to_local().numel() / p.numel() for p in weights]
    Path(os.environ["SHARDED"]).write_text(json.dumps(found))


def reduces(requires_gradient_sync: bool) -> None:
    assert requires_gradient_sync, "a backward pass would leave whole gradients on each card"


AcceleratorState.__init__ = init
accelerate.accelerator.fsdp2_prepare_model = prepare

"""What a test runs first in each process, so that the shipped FSDP files shard on CPUs.

accelerate takes its FSDP plugin for cards only: with `use_cpu` it trains under DDP without a warning. Here its state
reports that it shards, and torch's `fully_shard` does so over gloo. The file that `SHARDED` names gets which share of
each parameter lies on process 0, and the dtypes of the shares.
"""

import json
import os
from pathlib import Path

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

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
    shares = [p for p in model.parameters() if isinstance(p, DTensor)]
    if accelerator.is_main_process and "SHARDED" in os.environ:
        facts = {"shares": [p.to_local().numel() / p.numel() for p in shares]}
        Path(os.environ["SHARDED"]).write_text(json.dumps(facts | {"dtypes": [str(p.dtype) for p in shares]}))
    model.set_requires_gradient_sync = reduces
    return model


def reduces(requires_gradient_sync: bool) -> None:
    assert requires_gradient_sync, "a backward pass would leave whole gradients on each card"


AcceleratorState.__init__ = init
accelerate.accelerator.fsdp2_prepare_model = prepare

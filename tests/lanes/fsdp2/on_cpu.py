"""Runs a worker with FSDP2 on CPUs: `on_cpu.py WORKER OPTIONS...` under accelerate's launch.

accelerate takes its FSDP plugin for cards only: with `use_cpu` it trains under DDP and says nothing. Here its state is
told that it shards, and torch's `fully_shard` does so over gloo. The file that `SHARDED` names
gets which share of each parameter lies on process 0.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

plain_init, plain_prepare = AcceleratorState.__init__, accelerate.accelerator.fsdp2_prepare_model


def init(self, *args, fsdp_plugin=None, **kwargs) -> None:
    plain_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


def prepare(accelerator, model):
    model = plain_prepare(accelerator, model)
    halves = [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)]
    if accelerator.is_main_process:
        Path(os.environ["SHARDED"]).write_text(json.dumps(halves))
    return model


AcceleratorState.__init__ = init
accelerate.accelerator.fsdp2_prepare_model = prepare

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Sharded sizes equal DeepSpeed's own objects, built as rank 0 of a pretended world; its files are accepted.

A process group of the kind "fake" lets the real engine stand without its peers: collectives do nothing, sizes are
true. A process of its own, because a process group cannot be changed in a running one.
"""

import json
import os
import subprocess
import sys

import pytest

from trl_ext.memory.files import settings
from trl_ext.memory.formulas import states
from trl_ext.memory.formulas.engines import Engine
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.planner import plan
from trl_ext.memory.planner.presets import PRESETS

pytest.importorskip("deepspeed")

WORKER = """
import json, logging, sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
world, stages = int(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
import deepspeed
import deepspeed.comm.torch
# Else the CPU backend compiles a kernel for a minute. As an attribute, deepspeed.comm.torch is PyTorch itself.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
from deepspeed.utils import logger
logger.setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
for module in list(sys.modules.values()):
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        if module.__name__.startswith("deepspeed") and hasattr(module, name):
            setattr(module, name, lambda *a, **k: None)
found = {}
for stage in stages:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(8)]).to(torch.bfloat16)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()),
                                                 config=config)
    if stage == 3:
        masters = optimizer.fp32_partitioned_groups_flat
        weights = sum(p.ds_tensor.numel() for p in model.parameters())
        gradients = optimizer.grad_partitions_flat_buffer.numel()
    else:
        masters = optimizer.single_partition_of_fp32_groups
        weights, gradients = sum(p.numel() for p in model.parameters()), None
    found[stage] = {"masters": sum(m.numel() for m in masters), "bytes": sum(m.nbytes for m in masters),
                    "weights": weights, "gradients": gradients}
print("FOUND" + json.dumps(found), flush=True)
"""
WORLD, NUM_PARAMS = 4, 8 * 256 * 256


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", WORKER, str(WORLD), "[1, 2, 3]"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    lines = [line for line in out.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, out.stderr[-2000:]
    return {int(stage): sizes for stage, sizes in json.loads(lines[0].removeprefix("FOUND")).items()}


def engine(stage):
    return Engine(find_shape("8B"), Job("grpo", zero_stage=stage), WORLD, "policy", NUM_PARAMS)


@pytest.mark.parametrize(("stage", "share"), [(1, 1), (2, 1), (3, WORLD)])
def test_masters_are_an_nth_in_fp32_and_weights_under_zero3_alone(found, stage, share):
    sizes = found[stage]
    assert sizes["masters"] == -(-NUM_PARAMS // WORLD)
    assert sizes["bytes"] == states.optimizer_bytes(engine(stage)) / 3
    assert sizes["weights"] == NUM_PARAMS // share
    assert states.weight_bytes(engine(stage)) == 2 * sizes["weights"]
    if stage == 3:  # from the start
        assert states.gradient_bytes(engine(3)) == 2 * sizes["gradients"]


def plans():
    presets = {name: preset.plan().job for name, preset in PRESETS.items()}
    yield from ((name, job) for name, job in presets.items() if job.zero_stage)
    asked = plan("grpo", "7B", "4xA100-40GB", max_prompt_length=1024, max_completion_length=1024).plans
    yield from ((one.label, one.job) for one in asked if one.job.zero_stage)


def test_deepspeed_knows_every_key_of_a_written_file(subtests):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, job in plans():
        zero = settings.deepspeed(job)["zero_optimization"]
        # The Trainer fills "auto" in.
        zero = {key: 100_000 if value == "auto" else value for key, value in zero.items()}
        with subtests.test(name):
            assert DeepSpeedZeroConfig(**zero).stage == job.zero_stage

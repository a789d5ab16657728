"""hpZ, DeepSpeed's second copy of ZeRO-3's weights in each machine: its bytes, its seconds, its file."""

from dataclasses import replace

import pytest

from trl_ext import resources
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.files.launch import engine_fields, read_deepspeed
from trl_ext.memory.files.settings import deepspeed
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import lm_params
from trl_ext.memory.planner.planner import plan

SHAPE, JOB = find_shape("32B"), Job("grpo", zero_stage=3, global_batch=64)
HPZ = replace(JOB, zero_hpz_partition_size=8)


def test_it_costs_an_eighth_of_the_weights_and_spares_the_network_a_gather():
    cards = parse_gpus("4x8xH100-80GB")
    plain, hpz = (estimate(job, SHAPE, cards) for job in (JOB, HPZ))
    weights = [one.worst["step"].terms["policy weights"] for one in (plain, hpz)]
    assert weights[1] - weights[0] == pytest.approx(2 * lm_params(SHAPE) / 8)
    assert 0.5 < hpz.seconds["communication"] / plain.seconds["communication"] < 0.9


def test_in_one_machine_it_spares_nothing():
    seconds = [estimate(job, SHAPE, parse_gpus("8xH200")).seconds for job in (JOB, HPZ)]
    assert seconds[0] == seconds[1]


def test_the_shipped_file_and_a_plans_say_so():
    shipped = read_deepspeed(str(resources.deepspeed_config("zero3_hpz")))
    assert engine_fields(shipped, SHAPE)["zero_hpz_partition_size"] == 8
    best = plan("grpo", "32B", parse_gpus("4x8xH100-80GB"), zero_hpz_partition_size=8, use_vllm=True).best
    assert best.job.zero_stage == 3
    assert deepspeed(best.job)["zero_optimization"]["zero_hpz_partition_size"] == 8

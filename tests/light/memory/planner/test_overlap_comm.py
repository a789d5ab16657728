"""`overlap_comm` of ZeRO-1 and 2: its bucket, its seconds, its file, and where it is offered."""

from dataclasses import replace

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.files.launch import engine_fields
from trl_ext.memory.files.settings import deepspeed
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.formulas.states import bucket_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.planner import plan

SHAPE, CARDS = find_shape("3B"), parse_gpus("8xA40")
PCIE = {"model": "3B", "gpus": "8xA40", "max_length": 1024}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_bucket_hides_most_of_what_is_sent_behind_the_backward(stage):
    job = Job("reward", zero_stage=stage, global_batch=64)
    plain, overlapping = (estimate(one, SHAPE, CARDS) for one in (job, replace(job, overlap_comm=True)))
    buckets = [bucket_bytes(one.setup.engines[0]) for one in (plain, overlapping)]
    assert buckets == [2 * job.reduce_bucket_size, 4 * job.reduce_bucket_size]
    assert 0 < overlapping.seconds["communication"] < plain.seconds["communication"]
    assert overlapping.seconds["update"] == plain.seconds["update"]


def test_it_is_offered_where_sending_takes_long_and_stands_in_the_plans_file():
    def options(**settings):
        return [change.option for change, _ in plan("reward", **{**PCIE, **settings}).ways_out()]

    assert "--overlap_comm" in options(zero_stage=2)
    assert "--overlap_comm" not in options(gpus="8xA100-80GB", zero_stage=2)
    assert "--overlap_comm" not in options(zero_stage=3)
    best = plan("reward", **PCIE, overlap_comm=True).best
    assert best.job.zero_stage in (1, 2)
    engine = deepspeed(best.job)
    assert engine["zero_optimization"]["overlap_comm"] is True and engine_fields(engine, SHAPE)["overlap_comm"]
    assert "overlap_comm" not in deepspeed(replace(best.job, overlap_comm=False))["zero_optimization"]


@pytest.mark.parametrize(("stage", "is_told"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_file_of_another_stage_may_have_it(stage, is_told):
    engine = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
    fields = engine_fields(engine, SHAPE)
    assert fields["overlap_comm"] is is_told
    Job("reward", **fields)


def test_what_one_card_or_its_machine_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="and one trains"):
        plan("reward", "3B", "1xA40", overlap_comm=True)
    with pytest.raises(ConfigError, match="zero_hpz_partition_size 8 does not divide a machine's 4 GPUs"):
        plan("reward", "3B", "2x4xA40", zero_hpz_partition_size=8)

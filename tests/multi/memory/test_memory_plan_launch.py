"""`memory` under a launcher: the engine works with what the plan set, and the training is the one of before."""

import pytest

from tests.multi.launching import run_job, skip_what_cannot_run
from tests.nightly import daily
from trl_ext.memory.job import Job

TOLERANCE = 2e-6  # as in test_reward_zero
CARDS = "2xA40-48GB"


@pytest.fixture(scope="module")
def by_hand(tiny_reward_model, tmp_path_factory):
    """One process in micro-batches of one pair, every layer checkpointed."""
    return run_job("memory plan", None, tmp_path_factory.mktemp("hand"), model=tiny_reward_model)


@pytest.mark.parametrize("name", daily(("cpu", "zero2", "zero3"), "cpu"))
def test_two_planned_processes_train_what_one_by_hand_trains(name, by_hand, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_job("memory plan", name, tmp_path, model=tiny_reward_model, memory=CARDS)
    micro_batch, steps = run.facts["batch"]
    assert micro_batch * steps * 2 == 8
    assert micro_batch > by_hand.facts["batch"][0] and not run.facts["checkpointing"]
    assert run.facts["loss"] == pytest.approx(by_hand.facts["loss"], rel=TOLERANCE, abs=TOLERANCE)
    assert run.distance(by_hand) <= TOLERANCE
    if name.startswith("zero"):
        assert run.facts["zero_stage"] == int(name[4])
        assert run.facts["engine_batch"] == run.facts["batch"]
        assert run.facts["reduce_bucket_size"] == Job("reward").reduce_bucket_size

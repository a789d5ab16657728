"""`memory` under a launcher: the engine works with what the plan set, and the training is the one of before."""

import pytest

from tests.multi.launching import PROGRAMS, launched, run_worker, skip_what_cannot_run
from tests.multi.warm import warm_python
from tests.nightly import daily
from trl_ext.memory.job import Job

WORKER = PROGRAMS / "memory_plan_worker.py"
TOLERANCE = 2e-6  # as in test_reward_zero
CARDS = "2xA40-48GB"


@pytest.fixture(scope="module")
def by_hand(tiny_reward_model, tmp_path_factory):
    """One process in micro-batches of one pair, every layer checkpointed."""
    return run_worker(WORKER, [warm_python()], tiny_reward_model, tmp_path_factory.mktemp("hand") / "out", 1)


@pytest.mark.parametrize("name", daily(("cpu", "zero2", "zero3"), "cpu"))
def test_two_planned_processes_train_what_one_by_hand_trains(name, by_hand, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_worker(WORKER, launched(name, 2), tiny_reward_model, tmp_path / "out", 2, "--memory", CARDS)
    assert run.facts["micro_batch"] * run.facts["steps"] * 2 == 8
    assert run.facts["micro_batch"] > by_hand.facts["micro_batch"] and not run.facts["checkpointing"]
    assert run.facts["loss"] == pytest.approx(by_hand.facts["loss"], rel=TOLERANCE, abs=TOLERANCE)
    assert run.distance(by_hand) <= TOLERANCE
    if name.startswith("zero"):
        assert run.facts["stage"] == int(name[4])
        assert (run.facts["engine_micro_batch"], run.facts["engine_steps"]) == (
            run.facts["micro_batch"],
            run.facts["steps"],
        )
        assert run.facts["reduce_bucket_size"] == Job("reward").reduce_bucket_size

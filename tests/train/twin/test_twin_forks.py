"""The forking server answers as a process of its own does."""

import pytest

from tests.plans import config
from trl_ext.memory.job import Job
from trl_ext.twin import run_apart, simulation_of

SMALL = config("llama", 512, 64, 128, 1, 2, kv_heads=2)


@pytest.fixture(scope="module")
def simulation():
    return simulation_of(Job("reward", global_batch=1, max_length=32), SMALL, 1)


def test_a_fork_counts_what_a_process_of_its_own_counts_and_so_does_the_next_one(simulation, twin):
    first, second = twin(simulation), twin(simulation)
    assert first.peaks == second.peaks == run_apart(simulation).peaks
    assert first.peak_bytes > 0


def test_what_a_simulation_dies_of_is_told_and_the_next_one_runs(simulation, twin):
    broken = simulation_of(Job("reward", global_batch=1, max_length=32), {**SMALL, "model_type": "nothing"}, 1)
    assert "nothing" in twin(broken).refusal
    assert not twin(simulation).refusal

"""The memory twin: what it counts of an ensemble, and how it tells that it cannot follow.

The model has the widths of an 8B model, two layers and a small vocabulary:
fake tensors cost time by number, not by size. Whether formulas and twin agree is test_twin_matrix.py's.
"""

import pytest

from tests.plans import config
from tests.twin import run_apart, simulation_of
from tests.twin.driver import last_words
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import scorer_params

CONFIG = config("llama", 32768, 4096, 14336, 2, 32, kv_heads=8, head_dim=128, max_position_embeddings=8192)
ENSEMBLE = {"max_prompt_length": 512, "max_completion_length": 512, "num_generations": 1, "global_batch": 1}
ENSEMBLE |= {"method": "lora", "critic": "head", "reward_model": "copy"}


@pytest.mark.nightly
def test_every_reward_model_of_an_ensemble_is_there(twin):
    jobs = (Job("ppo", **ENSEMBLE, num_reward_models=number) for number in (1, 3))
    one, three = (twin(simulation_of(job, CONFIG, 1)) for job in jobs)
    assert not one.refusal and not three.refusal
    scorer = 2 * scorer_params(find_shape(CONFIG))
    assert three.peaks["update"].num_bytes - one.peaks["update"].num_bytes == pytest.approx(2 * scorer, rel=0.01)


def test_a_crash_is_told_by_its_last_words():
    errors = '[rank0]:   File "stage3.py", line 9, in flatten\n[rank0]:     assert same\n[rank0]: AssertionError\n'
    assert last_words(errors) == 'AssertionError, File "stage3.py", line 9, in flatten'
    assert last_words("ValueError: the key 'x' is wrong.\n") == "ValueError: the key 'x' is wrong"


SMALL = config("llama", 512, 64, 128, 1, 2, kv_heads=2)


def small(**changes):
    return simulation_of(Job("reward", global_batch=1, max_length=32), SMALL | changes, 1)


@pytest.mark.nightly
def test_a_fork_counts_what_a_process_of_its_own_counts(twin):
    found = twin(small())
    assert found.peaks == run_apart(small()).peaks and found.peak_bytes > 0


def test_what_a_simulation_dies_of_is_told(twin):
    assert "nothing" in twin(small(model_type="nothing")).refusal

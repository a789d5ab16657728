"""The memory twin: what it counts of two critics and of an ensemble, and how it tells that it cannot follow.

The model has the widths of an 8B model, two layers and a small vocabulary:
fake tensors cost time by number, not by size. Whether formulas and twin agree is test_twin_matrix.py's.
"""

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.plans import config
from tests.twin import run_apart, simulation_of
from tests.twin.driver import last_words
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import scorer_params

CONFIG = config("llama", 32768, 4096, 14336, 2, 32, kv_heads=8, head_dim=128, max_position_embeddings=8192)
LENGTHS = {"max_length": 1024, "max_prompt_length": 512, "max_completion_length": 512}
LORA = {"method": "lora"}


def job_of(trainer, num_gpus, settings):
    """Two micro-batches where one process would have no group, else one."""
    group = 2 if trainer == "grpo" else 1
    batch = {"num_generations": group, "global_batch": max(num_gpus, group)}
    return Job(trainer, **{**batch, **LENGTHS, **settings})


def counted(twin, trainer, num_gpus, settings):
    if settings.get("zero_stage"):
        pytest.importorskip("deepspeed")
    result = twin(simulation_of(job_of(trainer, num_gpus, settings), CONFIG, num_gpus))
    assert not result.refusal, result.refusal
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("zero_stage", [2, 3] if IS_THOROUGH else [2])
def test_the_adapter_critic_holds_no_checkpoints_beside_the_policys(zero_stage, twin):
    """Its gradient is there before the policy's forward. ZeRO-3 has one backward for both losses: the embeddings and
    the inputs of both layers are there twice."""
    alone = counted(twin, "ppo", 8, {**LORA, "zero_stage": zero_stage, "critic": "head"})
    both = counted(twin, "ppo", 8, {**LORA, "zero_stage": zero_stage, "critic": "adapter"})
    tokens = LENGTHS["max_prompt_length"] + LENGTHS["max_completion_length"]
    checkpoints = 2 * CONFIG["hidden_size"] * CONFIG["num_hidden_layers"] * tokens
    more = both.peaks["update"].num_bytes - alone.peaks["update"].num_bytes
    assert (more > checkpoints) == (zero_stage == 3)
    assert both.num_trained == 2 * (alone.num_trained - CONFIG["hidden_size"] - 1) + CONFIG["hidden_size"] + 1


@pytest.mark.nightly
def test_every_reward_model_of_an_ensemble_is_there(twin):
    settings = {**LORA, "critic": "head", "reward_model": "copy"}
    one, three = (counted(twin, "ppo", 1, {**settings, "num_reward_models": number}) for number in (1, 3))
    scorer = 2 * scorer_params(find_shape(CONFIG))
    assert three.peaks["update"].num_bytes - one.peaks["update"].num_bytes == pytest.approx(2 * scorer, rel=0.01)


def test_a_crash_is_told_by_its_last_words():
    errors = '[rank0]:   File "stage3.py", line 9, in flatten\n[rank0]:     assert same\n[rank0]: AssertionError\n'
    assert last_words(errors) == 'AssertionError, File "stage3.py", line 9, in flatten'
    assert last_words("ValueError: the key 'x' is wrong.\n") == "ValueError: the key 'x' is wrong"


SMALL = config("llama", 512, 64, 128, 1, 2, kv_heads=2)


def test_a_fork_counts_what_a_process_of_its_own_counts_and_what_it_dies_of_is_told(twin):
    simulation, broken = (
        simulation_of(Job("reward", global_batch=1, max_length=32), SMALL | changes, 1)
        for changes in ({}, {"model_type": "nothing"})
    )
    found = twin(simulation)
    assert found.peaks == run_apart(simulation).peaks and found.peak_bytes > 0
    assert "nothing" in twin(broken).refusal

"""Rows that several GPUs share (`sequence_parallel`): what a GPU holds of them, where they are offered and refused."""

from dataclasses import replace

import pytest

from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.files.settings import recipe
from trl_ext.memory.formulas.activations import attention_bytes
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.formulas.times import _shared_row_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.alternatives import alternatives
from trl_ext.memory.planner.planner import plan

SHAPE = find_shape("8B")  # 32 heads, 8 of keys and values
LONG = {"max_prompt_length": 2048, "max_completion_length": 75_000, "use_vllm": True}


def job_of(size, **changes):
    settings = {"zero_stage": 2, "global_batch": 64, "max_prompt_length": 1000, "max_completion_length": 3000}
    return Job("grpo", **{**settings, "sequence_parallel": size, **changes})


def estimated(size, **changes):
    return estimate(job_of(size, **changes), SHAPE, parse_gpus("8xH200"))


@pytest.mark.parametrize("size", [2, 4])
def test_a_gpu_holds_its_part_of_the_tokens(size):
    long = {"max_completion_length": 75_000, "steps_per_generation": 1}
    alone, shared = (estimated(n, **long).terms_gib("update") for n in (1, size))
    assert shared["checkpoints"] == pytest.approx(alone["checkpoints"] / size)
    assert alone["layer work"] / size < shared["layer work"] < alone["layer work"] / size * 1.1
    assert shared["policy weights"] == alone["policy weights"]


def test_keys_are_repeated_where_there_are_fewer_than_gpus_and_adapters_keep_what_they_adapt():
    few, many = (attention_bytes(SHAPE, job_of(size)) for size in (8, 16))
    assert many - few == 4 * SHAPE.kv_width
    targets = [("q_proj",), ("q_proj", "o_proj")]
    without, with_output = (
        attention_bytes(SHAPE, job_of(2, method="lora", lora_target_modules=names)) for names in targets
    )
    assert with_output - without == 2 * SHAPE.q_width


@pytest.mark.parametrize(("batch", "size", "scored"), [(1, 1, 3000), (1, 2, 2000), (2, 2, 3000), (3, 2, 5000)])
def test_scored_tokens_are_those_of_the_part_that_has_most(batch, size, scored):
    assert job_of(size, per_device_train_batch_size=batch).scored_tokens == scored


def test_a_gpu_goes_through_the_forwards_of_its_group_with_as_many_tokens_as_that_may_have():
    assert [job_of(size).num_backwards(8) for size in (1, 4)] == [8, 32]
    bounded = replace(job_of(2, per_device_train_batch_size=4), max_tokens_per_forward=8000)
    assert (bounded.row_tokens, bounded.forward_tokens) == (8000, 4000)


@pytest.mark.parametrize(
    ("model", "gpus", "size"), [("Qwen/Qwen2.5-7B", "8xH100-80GB", 8), ("Qwen/Qwen2.5-0.5B", "7xA100-80GB", 7)]
)
def test_heads_that_cannot_be_dealt_to_all_gpus_are_no_reason_to_refuse(model, gpus, size):
    settings = {"max_length": 32_000, "global_batch": 8 * size, "zero_stage": 2}
    (found, *_) = plan("reward", model, gpus, **settings, sequence_parallel=size).plans
    assert found.job.sequence_parallel == size


def test_keys_are_copied_to_every_line_that_deals_heads():
    shape = find_shape("Qwen/Qwen2.5-7B")  # 28 heads, 4 of keys and values
    by_four, by_eight = (attention_bytes(shape, job_of(size)) for size in (4, 8))
    assert by_eight - by_four == 4 * shape.kv_width
    setups = [estimate(job_of(size), shape, parse_gpus("8xH200")).setup for size in (4, 8)]
    four, eight = (_shared_row_bytes(setup) for setup in setups)
    # All but an eighth of queries, and of keys for two lines, where it was all but a quarter.
    assert eight / four == pytest.approx(7 / 8 * (3584 + 2 * 512) / (3 / 4 * (3584 + 512)))


def test_what_is_sent_for_attention_has_its_time():
    setups = [estimated(size).setup for size in (1, 2, 4)]
    sent = [_shared_row_bytes(setup) for setup in setups]
    assert sent[0] == 0
    assert sent[2] / sent[1] == pytest.approx(0.75 / 0.5)  # all but a GPU's own share
    # Forward, recomputation and backward of 8 completions and their prompt: q, k, v and every layer's output, in bf16.
    assert sent[1] == 0.5 * 3 * (1000 + 8 * 3000) * 32 * 2 * 2 * (4096 + 1024)
    assert estimated(4).seconds["communication"] > estimated(1).seconds["communication"]


@pytest.mark.slow
def test_a_plan_names_it_in_its_label_and_in_its_recipe():
    best = plan("grpo", "8B", "8xH100-80GB", **LONG, sequence_parallel=4).best
    assert best.label.endswith("rows shared by 4 GPUs")
    assert recipe(best.job, "8B", 8)["sequence_parallel"] == 4
    assert "sequence_parallel" not in recipe(job_of(1), "8B", 8)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "settings"), [("grpo", LONG), ("reward", {"max_length": 77_000})])
def test_it_is_offered_where_length_is_what_does_not_fit(trainer, settings):
    plans = plan(trainer, "8B", "8xA100-40GB", **settings)
    assert not plans.plans
    assert plans.advice[0].startswith("--sequence_parallel 2: ")
    assert plans.advice_for_run[0].startswith("sequence_parallel=2: ")
    assert [sentence for sentence in plans.advice if "sequence_parallel" in sentence] == [plans.advice[0]]
    assert plan(trainer, "8B", "8xA100-40GB", **settings, sequence_parallel=2).plans


def test_it_is_not_offered_where_weights_are_what_does_not_fit_nor_for_a_mixture():
    plans = plan("reward", "70B", "2xA40-48GB", max_length=512, offload="none")
    assert not plans.plans
    assert not any("sequence_parallel" in sentence for sentence in plans.advice)
    plans = plan("reward", "Qwen/Qwen3-30B-A3B", "8xA100-40GB", max_length=32_000)
    assert not any("sequence_parallel" in sentence for sentence in plans.advice)


def test_it_is_an_alternative_for_a_run_with_one_long_row():
    run = estimated(1, max_prompt_length=2000, max_completion_length=60_000, zero_stage=3, offload="all")
    changes = [one.key for one in alternatives(run, "update")]
    assert any(change.startswith("sequence_parallel=") for change in changes)

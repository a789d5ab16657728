"""The planner's seconds against those of one H100 80GB (2026-11-26): four updates of a Qwen3-8B that ran alone, and
rows that ran beside others, whose seconds are upper bounds."""

import pytest

from trl_ext.memory import Job, find_shape, parse_gpus
from trl_ext.memory.formulas.estimate import quick_estimate

H100 = parse_gpus("1xH100-80GB")
QWEN = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960}
DUALKV, TAIL = {**QWEN, "num_hidden_layers": 14}, {**QWEN, "num_hidden_layers": 36}
# One prompt with 32 completions of 2,048 tokens; four with eight of 513 on the mean, the longest that came 2,425.
LONG = {"max_prompt_length": 8192, "max_completion_length": 2048, "num_generations": 32}
SHORT = {"max_prompt_length": 256, "max_completion_length": 4096, "num_generations": 8}
ALONE = [
    ("TRL, padded", DUALKV, {**LONG, "packing": False}, 19.525),
    ("TRL, padded to the longest", TAIL, {**SHORT, "packing": False, "max_completion_length": 2425}, 15.679),
    ("packed", DUALKV, {**LONG, "max_tokens_per_forward": 40960}, 6.513),
    ("packed, other lengths", TAIL, {**SHORT, "max_tokens_per_forward": 17408, "mean_completion_length": 513}, 2.577),
]
PAIRS = {"max_length": 2048}
LENGTHS = {"max_prompt_length": 512, "max_completion_length": 512, "num_generations": 1, "beta": 0.05}
BESIDE = [
    ("reward", "meta-llama/Llama-3.1-8B", {"method": "lora", "global_batch": 4, **PAIRS}, 2, {"update": 2.573}),
    ("reward", "Qwen/Qwen2.5-1.5B", {"global_batch": 8, "dtype": "float32", **PAIRS}, 4, {"update": 1.031}),
    (
        *("ppo", "meta-llama/Llama-3.1-8B", {"method": "lora", "critic": "adapter", "global_batch": 16, **LENGTHS}, 8),
        {"update": 4.664, "scoring": 1.782},
    ),
    (
        *("ppo", "meta-llama/Llama-3.2-1B", {"critic": "head", "global_batch": 16, "dtype": "float32", **LENGTHS}, 8),
        {"update": 0.458, "scoring": 0.223},
    ),
]


def seconds(trainer, config, micro, **settings):
    job = Job(trainer, per_device_train_batch_size=micro, **settings)
    return quick_estimate(job, find_shape(config), H100).seconds


@pytest.mark.parametrize(("name", "config", "settings", "measured"), ALONE)
def test_an_update_takes_what_it_took_on_a_card(name, config, settings, measured):
    planned = seconds("grpo", config, 4, global_batch=32, **settings)["update"]
    assert 0.85 <= planned / measured <= 1.15


@pytest.mark.parametrize(("trainer", "model", "settings", "micro", "measured"), BESIDE)
def test_no_part_is_planned_much_longer_than_it_took_beside_other_runs(trainer, model, settings, micro, measured):
    planned = seconds(trainer, model, micro, **settings)
    assert {part: planned[part] / took for part, took in measured.items() if planned[part] > 1.15 * took} == {}
    assert all(planned[part] > 0.6 * took for part, took in measured.items())


def test_a_prompt_counts_once_a_group_where_rows_are_packed():
    """By hand: 32 rows of 8,192 + 2,048 tokens, of which 32 prompts or one are forwarded."""
    packed, padded = (
        seconds("grpo", DUALKV, 4, global_batch=32, packing=on, **LONG)["update"] for on in (True, False)
    )
    assert 3 < padded / packed < 32 * 10240 / (8192 + 32 * 2048)
    # On more GPUs than prompts each has a whole one; under FSDP each forward has.
    spread = quick_estimate(Job("grpo", global_batch=32, **LONG), find_shape(DUALKV), parse_gpus("4xH100-80GB"))
    assert spread.seconds["update"] > packed / 4
    split = {"global_batch": 32, "zero_stage": 3, **LONG}
    ours, fsdp = (seconds("grpo", DUALKV, 4, fsdp=on, **split)["update"] for on in (False, True))
    assert packed == ours < fsdp < padded


def test_scoring_is_a_pass_of_all_weights_and_a_value_head_has_none_of_its_own():
    settings = {"max_prompt_length": 512, "max_completion_length": 512, "num_generations": 1}
    head, adapter = (
        seconds("ppo", "8B", 1, method="lora", critic=critic, beta=0.05, **settings)["scoring"]
        for critic in ("head", "adapter")
    )
    assert adapter == pytest.approx(1.5 * head)
    full = seconds("ppo", "8B", 1, critic="head", beta=0.05, **settings)["scoring"]
    assert full == pytest.approx(head)

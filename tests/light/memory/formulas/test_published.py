"""The planner against runs that others have published: seconds, GiB, and whether a run fits."""

from statistics import median

import pytest

from benchmarks.published import families, rows
from trl_ext.memory.planner.planner import plan

ROWS = list(rows())
RL = {"max_prompt_length": 512, "max_completion_length": 1024}
OPTIMIZER = {"offload": "optimizer", "zero_stage": 2}
# (published, trainer, model, cards, settings)
VERDICTS = [
    (True, "grpo", "Qwen/Qwen2.5-32B", "8xA100-80GB", {"zero_stage": 3, "offload": "none", **RL}),  # ms-swift
    (
        *(True, "grpo", "Qwen/Qwen2.5-32B", "8xA100-80GB"),  # ms-swift: 8,192 tokens, packed
        {
            "zero_stage": 3,
            "offload": "none",
            "max_prompt_length": 1,
            "max_completion_length": 8191,
            "global_batch": 16,
        },
    ),
    (True, "grpo", "Qwen/Qwen2.5-32B", "4xH100-80GB", {"method": "lora", "use_vllm": True, **RL}),  # verl
    (True, "grpo", "Qwen/Qwen2.5-72B", "8xH100-80GB", {"method": "lora", "use_vllm": True, **RL}),  # verl
    (True, "grpo", "Qwen/Qwen2.5-72B", "4xA100-80GB", {"method": "lora", "use_vllm": True, **RL}),  # ms-swift
    (False, "grpo", "8B", "1xA100-80GB", {"offload": "none", "max_prompt_length": 512, "max_completion_length": 512}),
    (True, "grpo", "8B", "1xA100-80GB", {**OPTIMIZER, "max_prompt_length": 512, "max_completion_length": 512}),
    (False, "grpo", "Qwen/Qwen2.5-32B", "7xA100-80GB", {"offload": "none", "num_generations": 7, **RL}),
    (True, "reward", "32B", "1xRTX4090-24GB", {"method": "qlora", "max_length": 256}),  # QLoRA paper, 33B
    (True, "reward", "70B", "1xA6000-48GB", {"method": "qlora", "max_length": 256}),  # QLoRA paper, 65B
]


def test_seconds_are_those_of_published_runs_within_a_quarter_by_family():
    timed = [row for row in ROWS if row.seconds is not None]
    medians = {name: median(row.time_ratio for row in some) for name, some in families(timed).items()}
    assert len(medians) == 9 and all(0.8 <= one <= 1.25 for one in medians.values()), medians
    within = [1 / 1.5 <= row.time_ratio <= 1.5 for row in timed]
    assert len(within) == 68 and sum(within) >= 0.85 * len(within)


def test_gib_are_those_of_published_runs_within_a_tenth():
    ratios = {f"{row.family}: {row.name}": row.memory_ratio for row in ROWS if row.gib is not None}
    within = [one for one in ratios.values() if abs(one - 1) <= 0.1]
    assert len(ratios) == 41 and len(within) >= 0.85 * len(ratios), ratios
    assert sum(one < 0.9 for one in ratios.values()) <= 2


@pytest.mark.parametrize("published, trainer, model, gpus, settings", VERDICTS)
def test_what_fits_and_what_does_not_is_as_published(published, trainer, model, gpus, settings):
    assert bool(plan(trainer, model, gpus, **settings).plans) == published

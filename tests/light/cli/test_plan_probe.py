"""`trl-ext plan --probe` without a launch: what it makes of a run's log, and what it refuses."""

import pytest

from trl_ext.cli.plan.command import plan
from trl_ext.cli.plan.probe import Trial, measured, sentences
from trl_ext.errors import ConfigError

LOG = [
    {"step": 1, "phase/generate_s": 5.0, "phase/update_s": 4.0, "memory/update_gib": 9.0, "memory/reserved_gib": 30.0},
    {"step": 2, "phase/generate_s": 2.0, "phase/update_s": 1.0, "memory/update_gib": 11.5, "memory/step_gib": 10.0},
    {"step": 3, "phase/generate_s": 2.0, "phase/update_s": 1.5, "memory/predicted_update_gib": 20.0},
    {"train_runtime": 20.0},
]


def test_the_peak_is_the_largest_of_all_phases_and_the_first_step_is_no_measure_of_time():
    assert measured(LOG) == (11.5, 3.25)


def test_a_cpu_measures_seconds_alone():
    assert measured([{"phase/update_s": 2.0}]) == (None, 2.0)


def test_the_answer_says_which_estimate_was_right():
    lines = sentences([Trial("ZeRO-2", 20.0, 30.0, gib=21.0, s=40.0), Trial("DDP", 22.0, 31.0, gib=30.0, s=30.0)])
    assert lines[1:] == [
        "  ZeRO-2: 21.00 GiB (20.00: right); 40.00 s a step (30.00: -25%)",
        "  DDP: 30.00 GiB (22.00: -27%); 30.00 s a step (31.00: right)",
        "Fastest: DDP, and not ZeRO-2, as estimated.",
    ]


def test_a_run_that_dies_is_an_answer():
    died = Trial("DDP", 22.0, 31.0, ended="out of memory")
    assert sentences([died])[1:] == ["  DDP: out of memory", "None of them ran."]
    lines = sentences([died, Trial("ZeRO-2", 20.0, 30.0, s=30.0)])
    assert lines[2] == "  ZeRO-2: memory is not measured on a CPU; 30.00 s a step (30.00: right)"


def test_a_server_is_not_started(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    question = f"--trainer grpo --model {tmp_path} --gpus 2xH200 --use_vllm --vllm_mode server --method lora --probe"
    with pytest.raises(ConfigError, match="--probe starts no vLLM server"):
        plan(question.split())


def test_a_size_cannot_be_probed():
    with pytest.raises(ConfigError, match="8B has no weights"):
        plan("--trainer grpo --model 8B --gpus 1xH200 --probe".split())

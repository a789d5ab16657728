"""`trl-ext plan --probe` runs what it plans: here a tiny model on the CPU, where only seconds are measured."""

import json
import sys

from tests.multi.launching import environment
from tests.multi.warm import warm_python
from trl_ext.cli.plan.command import plan

QUESTION = "--trainer grpo --gpus 1x4090 --zero_stage 0 --global_batch 8 --num_generations 4 --max_prompt_length 16"


def test_three_steps_of_a_plan_are_measured(tiny_model, monkeypatch, capfd):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(warm_python()))
    question = [*QUESTION.split(), "--max_completion_length", "8", "--model", str(tiny_model), "--probe", "--json"]
    assert plan(question) == 0
    answer = json.loads(capfd.readouterr().out)
    (probe,) = answer["probe"]
    assert probe["ended"] == "" and probe["gib"] is None
    assert 0 < probe["s"] < 60 and probe["estimated_gib"] > 0
    assert probe["label"] == answer["plans"][0]["label"]

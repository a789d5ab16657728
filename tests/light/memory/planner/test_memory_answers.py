"""Six models on four machines, two trainers, two lengths: 96 questions whose answers stay what they were.

`answers_of_96_questions.csv` was written by formulas that replayed DeepSpeed's fetching of weights (0.4 % from the
twin), before a bound took the replay's place. `fits_on_cards` is the verdict without offload, LoRA allowed; `fits` is
the verdict with it; `settings` are those of the best plan then, and `peak_gib` is their estimate. One verdict has
changed: GRPO of 70B with LoRA on 8 x A100-40 at 8,192 tokens fits without offload since ZeRO-3's slack is that of
published runs.
"""

import csv
from pathlib import Path
from statistics import mean

import pytest

from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job, changed
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.planner import plan

WORST, MEAN = 0.25, 0.05
LENGTHS = {
    ("reward", "2048"): {"max_length": 2048},
    ("reward", "8192"): {"max_length": 8192},
    ("grpo", "2048"): {"max_prompt_length": 512, "max_completion_length": 1536},
    ("grpo", "8192"): {"max_prompt_length": 1024, "max_completion_length": 7168},
}
with Path(__file__).with_name("answers_of_96_questions.csv").open() as file:
    ANSWERS = list(csv.DictReader(file))


def fits(answer, **settings):
    lengths = LENGTHS[answer["trainer"], answer["tokens"]]
    settings |= {"allow": ["lora"], "headroom": 0, **lengths}  # the answers were given without head-room
    found = plan(answer["trainer"], answer["model"], answer["gpus"], **settings)
    return "yes" if found.plans else "no"


def test_there_are_96_questions_with_both_answers():
    assert len(ANSWERS) == 96
    assert {answer["fits_on_cards"] for answer in ANSWERS} == {answer["fits"] for answer in ANSWERS} == {"yes", "no"}


@pytest.mark.slow
def test_every_verdict_is_the_same():
    assert [fits(answer) for answer in ANSWERS] == [answer["fits"] for answer in ANSWERS]


@pytest.mark.slow
def test_every_verdict_without_host_memory_is_the_same():
    assert [fits(answer, offload="none") for answer in ANSWERS] == [answer["fits_on_cards"] for answer in ANSWERS]


def test_the_best_plans_of_then_need_what_they_needed():
    apart = []
    for answer in ANSWERS:
        if answer["settings"]:
            settings = dict(setting.split("=") for setting in answer["settings"].split())
            job = changed(Job(answer["trainer"]), settings)
            found = estimate(job, find_shape(answer["model"]), parse_gpus(answer["gpus"]))
            assert found.peak_gib == pytest.approx(float(answer["peak_gib"]), rel=WORST)
            apart.append(abs(found.peak_gib / float(answer["peak_gib"]) - 1))
    assert mean(apart) <= MEAN

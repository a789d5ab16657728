"""What rules see of a training: the group of each completion and the step, under our trainer and under TRL's own."""

from dataclasses import dataclass

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout
from trl_ext import RuleSet
from trl_ext.rewards import Row, Rule, Verdict

torch.set_num_threads(1)

GENERATIONS, PROMPTS, STEPS = 4, 2, 2


@dataclass(frozen=True, kw_only=True)
class SeenInTraining(Rule):
    """Keeps the rows that it is asked for; pays for short completions."""

    tier = "inline"
    reads_group = True
    rows: list[Row]

    def score(self, row: Row) -> Verdict:
        self.rows.append(row)
        return Verdict(1.0 / len(row.completion_ids))


@pytest.mark.parametrize("house", [trl, trl_ext], ids=["trl", "trl_ext"])
def test_a_rule_sees_the_groups_and_the_steps_of_a_training(house, tmp_path):
    rule = SeenInTraining(rows=[])
    args = house.GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=STEPS, save_strategy="no",
        per_device_train_batch_size=GENERATIONS * PROMPTS, num_generations=GENERATIONS, max_completion_length=12,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [tiny.words(5, 6 + n) for n in range(PROMPTS * STEPS)]})
    house.GRPOTrainer(
        tiny.model("llama"), RuleSet([rule]), args, data, processing_class=tiny.tokenizer(), rollout_func=rollout
    ).train()
    assert [row.step for row in rule.rows] == [0] * GENERATIONS * PROMPTS + [1] * GENERATIONS * PROMPTS
    for number, row in enumerate(rule.rows):
        place = number % GENERATIONS
        whole = rule.rows[number - place : number - place + GENERATIONS]
        assert [one.completion_ids for one in row.group] == [
            one.completion_ids for one in whole[:place] + whole[place + 1 :]
        ]
        assert {one.prompt for one in row.group} == {row.prompt}

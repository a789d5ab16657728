"""`normalize_then_sum` beside a RuleSet: each rule normalised within its group, then weighted and summed (GDPO)."""

import statistics

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.rollouts import rollout
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError
from trl_ext.rewards import Call, Length

torch.set_num_threads(1)

GENERATIONS, PROMPTS = 4, 3


def number_of_words(row) -> float:
    return float(len(row.text.split()))


def first_word(row) -> float | None:
    """The number of the first word, to 1; None for one in five."""
    number = row.completion_ids[0]
    return None if number % 5 == 0 else number / tiny.VOCAB


def is_long(row) -> float:
    return float(len(row.completion_ids) > 3)


RULES = (
    Call(number_of_words, name="words", weight=0.01, isolate=False),
    Call(is_long, name="long", weight=2.0, isolate=False),
    Call(first_word, name="first", weight=-0.5, gate="long", isolate=False),
)


def rules(**options) -> RuleSet:
    return RuleSet(RULES, **options)


def trainer(folder, rewards, **changes) -> GRPOTrainer:
    settings = dict(
        use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=GENERATIONS * PROMPTS,
        num_generations=GENERATIONS, max_completion_length=12, multi_objective_aggregation="normalize_then_sum",
    )  # fmt: skip
    args = GRPOConfig(str(folder), **settings | changes)
    data = Dataset.from_dict({"prompt": [tiny.words(5, 6 + n) for n in range(PROMPTS)]})
    return GRPOTrainer(
        tiny.model("llama"), rewards, args, data, processing_class=tiny.tokenizer(), rollout_func=rollout
    )


def advantages(trainer: GRPOTrainer) -> tuple[list[float], list[list[int]]]:
    """TRL's advantages of one batch, and the completions they are of."""
    rows = [row for row in trainer.train_dataset for _ in range(GENERATIONS)]
    output = trainer._generate_and_score_completions(rows)
    ids = [
        tokens[mask.bool()].tolist()
        for tokens, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    return output["advantages"].tolist(), ids


def by_hand(completions: list[list[int]]) -> list[float]:
    """Equations 4 to 6 of arXiv:2601.05242, with what has no value left out, in plain Python."""
    tokenizer = tiny.tokenizer()
    values = []
    for ids in completions:
        words = float(len(tokenizer.decode(ids, skip_special_tokens=True).split()))
        is_open = float(len(ids) > 3)
        first = None if ids[0] % 5 == 0 else ids[0] / tiny.VOCAB
        values.append([words, is_open, first if is_open or first is None else 0.0])
    totals = [0.0] * len(values)
    for start in range(0, len(values), GENERATIONS):
        group = range(start, start + GENERATIONS)
        for place, rule in enumerate(RULES):
            known = [values[index][place] for index in group if values[index][place] is not None]
            for index in group:
                if values[index][place] is not None and len(known) > 1:
                    deviation = values[index][place] - statistics.mean(known)
                    totals[index] += rule.weight * deviation / (statistics.stdev(known) + 1e-4)
    mean, std = statistics.mean(totals), statistics.stdev(totals)
    return [(total - mean) / (std + 1e-4) for total in totals]


@pytest.mark.parametrize("is_split", [False, True])
def test_advantages_are_those_by_hand(is_split, tmp_path):
    found, completions = advantages(trainer(tmp_path, rules().split() if is_split else rules()))
    assert found == pytest.approx(by_hand(completions), abs=1e-5)
    assert len({round(advantage, 4) for advantage in found}) > 6


def test_a_weight_counts_after_the_normalisation(tmp_path):
    one, _ = advantages(trainer(tmp_path, rules()))
    light = [Call(number_of_words, name="words", weight=10.0, isolate=False), *RULES[1:]]
    other, _ = advantages(trainer(tmp_path, RuleSet(light)))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_weights_of_functions_multiply_those_of_their_rules(tmp_path):
    made = trainer(tmp_path, [rules(), lambda completions, **_: [0.0] * len(completions)], reward_weights=[0.5, 3.0])
    assert made.reward_weights.tolist() == pytest.approx([0.005, 1.0, -0.25, 3.0])
    assert made.reward_func_names[:3] == ["words", "long", "first"]
    assert made.args.reward_weights == [0.5, 3.0], "the user's config stays as it was"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(clip=(0, 1)), r"clip=\(0.0, 1.0\) of the rule set 'rules' is of its sum"),
        (dict(normalise=True), "normalise=True of the rule set 'rules' is of its sum"),
    ],
)
def test_what_only_a_sum_has_is_refused(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, rules(**options))


def test_a_schedule_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="The schedule of rule 'length' scales its value"):
        trainer(tmp_path, RuleSet([Length(high=2, schedule=((0, 1), (1, 0)))]))


def test_the_usual_aggregation_sums_the_set_itself(tmp_path):
    made = trainer(tmp_path, rules(), multi_objective_aggregation="sum_then_normalize")
    assert made.reward_func_names == ["rules"]


def test_a_run_trains(tmp_path):
    made = trainer(tmp_path, rules(), max_steps=2, save_strategy="no", disable_tqdm=True, learning_rate=1e-2)
    before = made.model.lm_head.weight.detach().clone()
    made.train()
    assert not torch.equal(before, made.model.lm_head.weight)

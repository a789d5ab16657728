"""Rules around a GRPO step: what they see, scored early and all at a time, saved and resumed with the checkpoint."""

import asyncio
import json
import statistics
from dataclasses import dataclass

import pytest
import trl
from datasets import Dataset

import trl_ext
from tests import ppo_trainers, tiny
from tests.grpo_trainers import trainer
from tests.rollouts import rollout
from tests.rules import rule_class
from trl_ext import GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import AsyncRule, Call, Length, Row, Rule, Tags, Verdict
from trl_ext.rewards.totals.scorer import Scorer
from trl_ext.trainers.grpo.rewards import RULES_FILE, guard, raise_together
from trl_ext.trainers.settings.checks import check_launch

GENERATIONS, PROMPTS, STEPS = 4, 2, 2
ROWS = GENERATIONS * PROMPTS
UNDER_WAY: list[int] = []
either_library = pytest.mark.parametrize("library", [trl, trl_ext], ids=["trl", "trl_ext"])


def prompts(count):
    return Dataset.from_dict({"prompt": [tiny.words(5, 6 + number) for number in range(count)]})


@dataclass(frozen=True, kw_only=True)
class SeenInTraining(Rule):
    """Keeps the rows that it is asked for; pays for short completions."""

    tier = "inline"
    reads_group = True
    rows: list[Row]

    def score(self, row: Row) -> Verdict:
        self.rows.append(row)
        return Verdict(1.0 / len(row.completion_ids))


@either_library
def test_a_rule_sees_the_groups_and_the_steps_of_a_training(library, tmp_path):
    rule = SeenInTraining(rows=[])
    settings = dict(max_steps=STEPS, per_device_train_batch_size=ROWS)
    trainer(tmp_path, library, rewards=RuleSet([rule]), data=prompts(PROMPTS * STEPS), **settings).train()
    assert [row.step for row in rule.rows] == [0] * ROWS + [1] * ROWS
    for number, row in enumerate(rule.rows):
        place = number % GENERATIONS
        whole = rule.rows[number - place : number - place + GENERATIONS]
        others = [one.completion_ids for one in whole[:place] + whole[place + 1 :]]
        assert [one.completion_ids for one in row.group] == others
        assert {one.prompt for one in row.group} == {row.prompt}


THINK = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<think>": 3, "</think>": 4} | {f"w{i}": i for i in range(5, tiny.VOCAB)}
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}<think>\n"
TEMPLATE += "{% if enable_thinking is false %}</think>\n{% endif %}{% endif %}"


def thinker(of_words=tiny.tokenizer):
    tokenizer = of_words({**THINK, "w3": tiny.VOCAB})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def closes_half_of_its_thoughts(prompts, trainer):
    ids = [[7, 4, 8, 2] if number % 2 else [7, 8, 2] for number in range(len(prompts))]
    return {"prompt_ids": [[5, 6, 3]] * len(prompts), "completion_ids": ids, "logprobs": None}


@pytest.mark.parametrize(("options", "values"), [({}, {0.0, 1.0}), ({"enable_thinking": False}, {0.0})])
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_tag_that_the_chat_template_opens_counts_in_a_training(method, options, values, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "tokenizer", thinker)
    seen = []
    spy = rule_class("Spy", lambda row: seen.append(Tags("think").score(row).value) or 1.0)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "w5 w6"}]}] * 8)
    settings = dict(max_steps=1, data=data, rollout_func=closes_half_of_its_thoughts, chat_template_kwargs=options)
    if method == "grpo":
        trainer(tmp_path, rewards=RuleSet([spy()]), **settings).train()
    else:
        ppo_trainers.trainer("head", tmp_path, reward_funcs=RuleSet([spy()]), **settings).train()
    assert set(seen) == values


# Rules that wait ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slow(AsyncRule):
    """1.0, once all other rows are under way, too; the third row that asks fails."""

    async def score(self, row: Row) -> Verdict:
        UNDER_WAY.append(1)
        mine = len(UNDER_WAY)
        while len(UNDER_WAY) < ROWS:
            await asyncio.sleep(0.001)
        if mine == 3:
            raise ConnectionError("away")
        return Verdict(1.0)

    def cache_key(self, row: Row) -> None:
        return None


async def reward_of_their_own(completions, **_):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


@either_library
def test_a_step_awaits_all_rows_at_a_time_and_a_failing_call_costs_its_own(library, tmp_path):
    UNDER_WAY.clear()
    rules = RuleSet([Slow(retries=0), Length(low=0, high=100, weight=0.1)])
    settings = dict(per_device_train_batch_size=ROWS, max_completion_length=8)
    subject = trainer(tmp_path, library, rewards=[rules, reward_of_their_own], data=prompts(PROMPTS), **settings)
    subject._generate_and_score_completions([row for row in subject.train_dataset for _ in range(GENERATIONS)])
    metrics = {name: values[-1] for name, values in subject._metrics["train"].items()}
    assert metrics["rewards/rules/mean"] == pytest.approx((7 * 1.1 + 0.1) / ROWS)
    assert metrics["rewards/reward_of_their_own/mean"] == 0.5
    assert metrics["rules/slow/none_frac"] == 1 / ROWS
    assert metrics["rules/slow/calls"] == ROWS


def length_of_text(row) -> float:
    return float(len(row.text))


def test_rules_in_workers_have_begun_before_they_are_asked(tmp_path, monkeypatch):
    taken = []
    original = Scorer._started_with

    def note(self, rules, rows):
        taken.append(original(self, rules, rows))
        return taken[-1]

    monkeypatch.setattr(Scorer, "_started_with", note)
    trainer(tmp_path, rewards=RuleSet([Call(length_of_text)]), max_completion_length=6, rollout_func=None).train()
    assert taken and all(taken)


# What rules have seen -----------------------------------------------------------------------------------------------


def normalising(folder, steps=2):
    rules = RuleSet([Call(length_of_text, isolate=False)], normalise=True)
    saves = dict(max_steps=2 * steps, save_strategy="steps", save_steps=steps)
    return rules, trainer(folder, rewards=rules, rollout_func=None, max_completion_length=6, **saves)


def test_a_checkpoint_holds_what_the_rules_have_seen_and_a_resumed_run_scores_like_the_uninterrupted_one(tmp_path):
    rules, whole = normalising(tmp_path)
    whole.train()
    early, late = (json.loads((tmp_path / f"checkpoint-{step}" / RULES_FILE).read_text()) for step in (2, 4))
    assert early["rules"]["moments"][0] == 2 * GENERATIONS
    assert late["rules"] == rules.state_dict()
    own, resumed = normalising(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rewards = [[log["reward"] for log in t.state.log_history if "reward" in log] for t in (whole, resumed)]
    assert rewards[1] == pytest.approx(rewards[0])
    assert own.state_dict() == rules.state_dict()


# The guard around reward functions -----------------------------------------------------------------------------------


def test_an_exception_waits_until_all_ranks_have_gathered():
    def broken(completions, **_):
        raise ZeroDivisionError("by row 3")

    reward = guard(broken, "my_reward")
    assert reward(completions=["a", "b"]) == [0.0, 0.0]
    with pytest.raises(RuleError, match=r"(?s)rank 0 the reward 'my_reward' raised.*in broken.*by row 3") as caught:
        raise_together([reward], rank=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class _Args:
    world_size = 1
    fsdp = ""


def test_processes_that_do_not_know_of_each_other_and_fewer_than_one_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launch(_Args())  # a cluster's own variable: nothing was launched
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="set use_cpu: true"):
        check_launch(_Args())
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="fewer than one process"):
        check_launch(_Args())


# normalize_then_sum: each rule normalised within its group, then weighted and summed (GDPO) --------------------------


NUM_PROMPTS = 3


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


def by_rule(folder, rewards, **changes) -> GRPOTrainer:
    settings = dict(per_device_train_batch_size=GENERATIONS * NUM_PROMPTS, num_generations=GENERATIONS)
    settings |= dict(multi_objective_aggregation="normalize_then_sum") | changes
    data = Dataset.from_dict({"prompt": [tiny.words(5, 6 + n) for n in range(NUM_PROMPTS)]})
    return trainer(folder, rewards=rewards, data=data, **settings)


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
    found, completions = advantages(by_rule(tmp_path, rules().split() if is_split else rules()))
    assert found == pytest.approx(by_hand(completions), abs=1e-5)
    assert len({round(advantage, 4) for advantage in found}) > 6


def test_weights_of_functions_multiply_those_of_their_rules(tmp_path):
    made = by_rule(tmp_path, [rules(), lambda completions, **_: [0.0] * len(completions)], reward_weights=[0.5, 3.0])
    assert made.reward_weights.tolist() == pytest.approx([0.005, 1.0, -0.25, 3.0])
    assert made.reward_func_names[:3] == ["words", "long", "first"]
    assert made.args.reward_weights == [0.5, 3.0], "the user's config stays as it was"


def test_what_only_a_sum_has_is_refused(tmp_path):
    for given, words in (
        (rules(clip=(0, 1)), r"clip=\(0.0, 1.0\) of the rule set 'rules' is of its sum"),
        (rules(normalise=True), "normalise=True of the rule set 'rules' is of its sum"),
    ):
        with pytest.raises(ConfigError, match=words):
            by_rule(tmp_path, given)


def test_the_usual_aggregation_sums_the_set_itself(tmp_path):
    made = by_rule(tmp_path, rules(), multi_objective_aggregation="sum_then_normalize")
    assert made.reward_func_names == ["rules"]


@pytest.mark.parametrize("given", [None, "w3"])
def test_a_rule_reads_a_column_that_a_rollout_func_adds_or_replaces(given, tmp_path):
    """Alone in the data it would be refused; what the data holds is not what counts."""

    def with_answers(prompts, trainer):
        return rollout(prompts, trainer) | {"answer": ["w4 w5"] * len(prompts)}

    def without(prompts, trainer):
        return rollout(prompts, trainer)

    data = prompts(PROMPTS) if given is None else prompts(PROMPTS).add_column("answer", [given] * PROMPTS)
    rules = RuleSet([OfTheRollout()])
    subject = trainer(tmp_path, rewards=rules, data=data, rollout_func=with_answers, max_steps=1)
    subject.train()
    assert subject.state.log_history[0]["rewards/of_the_rollout/mean"] == 1
    if given is None:
        with pytest.raises(RuleError, match="reads the column 'answer', which the dataset lacks"):
            trainer(tmp_path, rewards=rules, data=data, rollout_func=without, max_steps=1).train()


@dataclass(frozen=True, kw_only=True)
class OfTheRollout(Rule):
    """Pays where the answer is the rollout function's."""

    tier = "inline"
    columns = ("answer",)

    def score(self, row: Row) -> float:
        return float(row.columns["answer"] == "w4 w5")

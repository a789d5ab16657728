"""A rule that scores nothing ends the run at the first step, with its column, unless it is only not for that step."""

import asyncio
import json
import math

import pytest
from datasets import Dataset, IterableDataset

from tests import grpo_trainers, ppo_trainers, tiny
from tests.chat_server import ChatServer
from tests.workers.plain_rules import Dormant
from trl_ext import RuleSet
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer, AsyncRule, Judge, Length, Limits, Row, Rule, Verdict
from trl_ext.trainers.rows import gold


class Abstains(Rule):
    tier = "inline"

    def score(self, row: Row) -> Verdict:
        return Verdict(None, "infra_error", "no service")


class Waits(AsyncRule):
    async def score(self, row: Row) -> Verdict:
        await asyncio.sleep(3600)
        return Verdict(1.0)


def rules(*more: Rule, **options) -> RuleSet:
    return RuleSet([Answer(kind="exact"), Length(high=2, weight=0.1), *more], **options)


def rows_of(golds, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": [tiny.words(5, 6)] * len(golds), "answer": golds, **columns})


def stream_of(rows: Dataset) -> IterableDataset:
    return rows.to_iterable_dataset()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What the trainer warns of, about rules."""
    texts: list[str] = []
    monkeypatch.setattr(gold.logger, "warning", texts.append)
    return texts


@pytest.fixture
def train(tmp_path):
    def start(rewards, data, *, resume_from=None, **changes):
        """Two rows a step, a completion pair each: rows in their order."""
        settings = dict(max_completion_length=2, num_generations=2, shuffle_dataset=False, rollout_func=None) | changes
        subject = grpo_trainers.trainer(tmp_path, rewards=rewards, data=data, **settings)
        subject.train(resume_from_checkpoint=resume_from)
        return subject

    return start


@pytest.mark.parametrize("rule", [Dormant(), Waits(timeout_s=0.01, retries=0)], ids=["worker", "awaited"])
def test_a_rule_that_hangs_for_all_rows_ends_the_run_by_its_name(rule, train):
    limits = Limits(cpu_s=0.05, wall_s=0.1, workers=4)
    with pytest.raises(RuleError, match=f"'{rule.name}'"):
        given = rules(rule, limits=limits, on_unscored="warn")
        train(given, rows_of(["w7"] * 40), per_device_train_batch_size=8, max_steps=4)


def test_a_judge_that_is_cut_off_ends_the_run_at_the_first_step(train):
    data = Dataset.from_dict({"prompt": [tiny.words(5, n) for n in range(32)]})
    choice = {"finish_reason": "length", "message": {"content": "Let me think"}}
    with ChatServer(lambda request: json.dumps({"choices": [choice]}).encode()) as server:
        judge = Judge("m", base_url=server.url, weight=0.5)
        with pytest.raises(RuleError, match=r"rule 'judge' hold no score.* cut off at max_tokens=2048: 'Let"):
            train(RuleSet([judge, Length(high=2)]), data, per_device_train_batch_size=64, max_steps=2)
    assert len(server.requests) <= 64


NULL = [None] * 8
MIXED = [None, None, "w7", "w7"] * 2


@pytest.mark.parametrize("gold", [None, math.nan])
def test_a_stream_whose_gold_is_null_is_an_error_at_the_first_step(gold, train):
    data = rows_of([gold] * 8)
    with pytest.raises(
        DataError, match=r"'answer' scored none of the 4 completions .* 'answer' is null or NaN in all"
    ):
        train(RuleSet([Answer(), Length(high=2)]), stream_of(data))


def test_told_to_warn_the_run_goes_on_and_says_it_once(train, said):
    trainer = train(rules(on_unscored="warn"), stream_of(rows_of(NULL)))
    assert trainer.state.global_step == 2
    assert len(said) == 1 and "scored 0 of the 4 completions of step 1" in said[0] and "none_frac" in said[0]


def test_a_rule_without_a_column_that_scores_nothing_is_an_error_also_where_its_set_is_split(train):
    for given in (rules(Abstains()), rules(Abstains()).split()):
        with pytest.raises(DataError, match=r"'abstains' scored none of the 4 .* infra_error: no service"):
            train(given, rows_of(["w7"] * 8))


def test_a_stream_of_two_tasks_trains_where_the_other_task_has_its_rule(train, said):
    data = rows_of(MIXED, other=["w7", "w7", None, None] * 2)
    trainer = train(rules(Answer(kind="exact", gold="other", name="other")), stream_of(data))
    assert trainer.state.global_step == 2
    assert ["'answer' scored 0" in text for text in said] == [True, False]
    assert "'other' scored 0 of the 4 completions of step 2" in said[1]


def test_rows_that_when_leaves_out_are_nobodys_fault(train, said):
    data = rows_of(MIXED, task=["chat", "chat", "sums", "sums"] * 2)
    train(RuleSet([Answer(kind="exact", when={"task": "sums"}), Length(high=2)]), stream_of(data))
    assert said == []


def test_the_first_step_is_all_that_its_gradients_come_from(train, said):
    """Two batches of generations make an optimizer step; the rule scores the second one."""
    trainer = train(
        rules(), stream_of(rows_of(MIXED[:4])), max_steps=1, gradient_accumulation_steps=2, steps_per_generation=1
    )
    assert trainer.state.global_step == 1
    assert len(said) == 1 and "'answer' scored 4 of the 8 completions of step 1" in said[0]


def test_a_rule_that_stops_scoring_later_is_said_once(train, said):
    train(rules(), stream_of(rows_of(["w7"] * 2 + [None] * 4)), max_steps=3)
    assert len(said) == 1 and "'answer' scored 0 of the 4 completions of step 2" in said[0]


def test_a_resumed_run_has_had_its_first_step(train, said, tmp_path):
    data = rows_of(["w7"] * 2 + [None] * 6)
    train(rules(), stream_of(data), max_steps=1, save_strategy="steps", save_steps=1)
    trainer = train(rules(), stream_of(data), max_steps=2, resume_from=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2
    assert "'answer' scored 0 of the 4 completions of step 2" in said[-1]


def test_what_a_user_scored_beforehand_and_an_evaluation_do_not_count(train, said):
    given = rules()
    given(completions=["w7"] * 8, completion_ids=[[1]] * 8, answer=NULL)
    subject = train(given, rows_of(["w7"] * 8))
    subject.model.eval()
    subject._generate_and_score_completions(list(rows_of(NULL)))
    subject.model.train()
    subject._generate_and_score_completions(list(rows_of(["w7"] * 4)))
    assert said == []


@pytest.mark.parametrize("on_unscored", ["error", "warn"])
def test_ppo_holds_to_it_too(on_unscored, said, tmp_path):
    data = stream_of(rows_of(NULL))
    trainer = ppo_trainers.trainer(
        "head", tmp_path, data=data, reward_funcs=rules(on_unscored=on_unscored), max_steps=1, packing=False
    )
    if on_unscored == "warn":
        trainer.train()
        assert len(said) == 1
    else:
        with pytest.raises(DataError, match=r"'answer' scored none of the 8 completions of the first step"):
            trainer.train()

"""An exception of a rule that is shipped costs the completion alone, until more than 1 % of 20 steps' rows end so."""

import logging

import pytest

from tests.rules import rule_class
from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Keywords, RuleSet
from trl_ext.rewards.isolation.workers.breaker import Breaker

Raising = rule_class("Raising", lambda row: 1 / 0)


@pytest.fixture
def rules(monkeypatch):
    """Keywords that raise for one word, as a completion that nobody thought of may let a rule do."""
    plain = Keywords.score

    def score(self, row):
        if "odd" in row.text:
            raise IndexError("list index out of range")
        return plain(self, row)

    monkeypatch.setattr(Keywords, "score", score)
    return RuleSet([Keywords(required=("so",))])


def test_the_row_earns_the_floor_and_its_text_and_data_are_told(rules, caplog):
    caplog.set_level(logging.WARNING)
    texts = ["so"] * 150 + ["odd"]
    assert rules(completions=texts, answer=["42"] * 151) == [1.0] * 150 + [0.0]
    assert "'odd'" in caplog.text and "answer='42'" in caplog.text and "report" in caplog.text


def test_rows_that_all_end_so_stop_the_run_at_once(rules):
    with pytest.raises(RuleError, match="raised for 40 of the last 40 rows, more than 1% of the rows of 20 steps"):
        rules(completions=["odd"] * 40)


def test_more_than_1_percent_of_20_steps_stop_the_run(rules):
    for _ in range(2):
        rules(completions=["so"] * 99 + ["odd"])
    steps = 2
    with pytest.raises(RuleError, match="a bug of trl_ext"):
        while steps < 40:
            rules(completions=["so"] * 98 + ["odd"] * 2)
            steps += 1
    assert steps == 11  # 22 rows, of the 2,000 of 20 such steps


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_one_row_in_a_small_batch_goes_on(rows):
    breaker = Breaker("math", 0.05)
    breaker.record_mistakes(rows, 1, "IndexError")
    assert breaker.tripped is None
    breaker.record_mistakes(rows, 1, "IndexError")
    assert breaker.tripped is not None


def test_a_rule_of_the_users_stops_as_before():
    with pytest.raises(RuleError, match="ZeroDivisionError"):
        RuleSet([Raising()])(completions=["a", "b"])


def test_a_sentence_on_the_data_stops_as_before(monkeypatch):
    def score(self, row):
        raise RuleError("row 3 has no gold")

    monkeypatch.setattr(Answer, "score", score)
    with pytest.raises(RuleError, match="no gold"):
        RuleSet([Answer()], isolate=False)(completions=["a"], answer=["1"])

"""Undecided rows: no value, a share in the log, one warning where they are many."""

import logging

import pytest

from trl_ext.rewards import Answer, Row, Rule, RuleSet, Verdict


class Undecided(Rule):
    """Leaves rows undecided whose column says so."""

    tier = "inline"

    @property
    def columns(self):
        return ("mark",)

    def score(self, row: Row) -> Verdict:
        return Verdict(None, "undecided", f"mark {row.columns['mark']}") if row.columns["mark"] else Verdict(1.0)


def call(rules: RuleSet, marks: list[int], **more) -> list[float | None]:
    return rules(completions=["A: 18"] * len(marks), mark=marks, **more)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "trl_ext.rewards")
    return lambda: [record.getMessage() for record in caplog.records if "completions undecided" in record.getMessage()]


def test_an_undecided_row_is_left_out_of_the_total_and_its_share_is_logged():
    rules, metrics = RuleSet([Undecided(), Answer(weight=0.5)]), {}
    assert call(rules, [0, 1], answer=["18", "18"]) == [1.5, 0.5]
    assert call(RuleSet([Undecided()]), [0, 1, 2, 0], log_metric=metrics.__setitem__) == [1.0, None, None, 1.0]
    assert metrics["rules/undecided/undecided_frac"] == metrics["rules/undecided/none_frac"] == 0.5


def test_more_than_one_percent_of_a_hundred_rows_warns_once(warnings):
    rules = RuleSet([Undecided()])
    call(rules, [1] * 2 + [0] * 97)
    assert not warnings(), "99 rows are too few to tell"
    call(rules, [0, 7])
    call(rules, [1] * 100)
    assert len(warnings()) == 1
    assert "'undecided' left 3 of 101 completions undecided (3.0%)" in warnings()[0] and "mark 7" in warnings()[0]


def test_one_percent_does_not_warn_and_skipped_rows_do_not_count(warnings):
    call(RuleSet([Undecided()]), [1] + [0] * 99)
    rules = RuleSet([Undecided(when={"task": "sums"})])
    call(rules, [1] * 2 + [0] * 198, task=["sums"] * 50 + ["chat"] * 150)
    assert not warnings()


def test_columns_of_a_set_warn_each_for_its_own_rule(warnings):
    undecided, answer = RuleSet([Undecided(), Answer()]).split()
    call(answer, [1] * 100, answer=["18"] * 100)
    assert not warnings()
    call(undecided, [1] * 100, answer=["18"] * 100)
    assert len(warnings()) == 1

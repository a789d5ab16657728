"""What a set remembers of rows that its rules have no value for, undecided ones among them."""

import math

import pytest

from tests.rules import rule_class
from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Length, Math, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.totals.metrics import Tally

Abstains = rule_class("Abstains", lambda row: Verdict(None, "infra_error", "no service"))


class TextOnly(Rule):
    """Cannot compare golds with an ellipsis: only their own text is right, and any other answer is undecided."""

    tier = "inline"

    @property
    def columns(self):
        return ("answer",)

    def ideal(self, columns):
        return columns["answer"]

    def score(self, row: Row) -> Verdict:
        gold = row.columns["answer"]
        if not row.text or "..." not in gold or row.text == gold:
            return Verdict(float(row.text == gold))
        return Verdict(None, "undecided", f"gold {gold}")


def scored(rules: RuleSet, gold: list, **columns) -> dict[str, Tally]:
    rules(completions=["A: 18"] * len(gold), completion_ids=[[1]] * len(gold), answer=gold, **columns)
    return rules.take_tallies()


def test_rows_are_counted_by_rule_until_they_are_taken():
    tallies = scored(RuleSet([Answer(), Length(high=2)]), ["18", None, "unreadable", "17"])
    assert (tallies["answer"].num_rows, tallies["answer"].num_scored, tallies["answer"].num_null) == (4, 2, 1)
    assert tallies["length"] == Tally(4, 4)
    assert "None is neither text nor a number" in tallies["answer"].reason
    rules = RuleSet([Answer()])
    rules(completions=["A: 18"], answer=["18"])
    assert scored(rules, ["18", None])["answer"].num_rows == 3
    assert rules.take_tallies() == {}


def test_nan_is_no_gold():
    for kind in ("number", "exact"):
        rules = RuleSet([Answer(kind=kind), Length(high=2)])
        assert scored(rules, [math.nan, math.nan])["answer"].num_null == 2
        assert rules(completions=["nan"], completion_ids=[[1]], answer=[math.nan]) == [1.0], "length's alone"
    for rule in (Answer(kind="exact"), Math()):
        verdict = rule.score(Row(None, "nan", None, {"answer": math.nan, "solution": math.nan}))
        assert (verdict.value, verdict.status) == (None, "gold_invalid")


def test_rows_that_a_rule_is_not_for_do_not_count_and_those_that_another_scored_are_told_apart():
    rules = RuleSet([Answer(when={"task": "sums"})])
    assert scored(rules, [None, "18", None], task=["chat", "sums", "chat"])["answer"] == Tally(1, 1)
    nothing = scored(rules, [None], task=["chat"])["answer"]
    assert nothing == Tally() and not nothing.scored_nothing
    rules = RuleSet([Answer(), Answer(gold="other", name="other"), Length(high=2)])
    tallies = scored(rules, [None, None, None], other=["18", "18", None])
    assert tallies["answer"].num_covered == 2
    assert tallies["answer"].scored_nothing and not tallies["other"].scored_nothing


def test_a_column_of_a_set_counts_for_its_own_rule():
    columns = RuleSet([Answer(), Length(high=2, gate="answer")], on_unscored="warn").split()
    for column in columns:
        column(completions=["A: 18"], completion_ids=[[1]], answer=[None])
    assert [list(column.rules.take_tallies()) for column in columns] == [["answer"], ["length"]]
    assert {column.on_unscored for column in columns} == {"warn"}


def test_the_reason_names_the_column_or_what_the_rule_says():
    null, unreadable = scored(RuleSet([Answer()]), [None])["answer"], scored(RuleSet([Answer()]), ["?"])["answer"]
    assert null.why(Answer()) == "'answer' is null or NaN in all of these rows"
    assert unreadable.why(Answer()).startswith("the reason of the first such row: gold_invalid: column 'answer'")
    failed = scored(RuleSet([Abstains()]), ["18"])["abstains"]
    assert failed.why(Abstains()) == "the reason of the first such row: infra_error: no service"


def values(rules, name, golds):
    return [verdict.value for verdict in rules.verdicts_on_data(name, ["?"] * len(golds), {"answer": golds})]


def test_whether_a_row_can_be_scored_does_not_depend_on_its_completion():
    rules = RuleSet([Answer(), Length(high=2)])
    assert values(rules, "answer", ["18", None, "unreadable"]) == [0.0, None, None]
    assert rules.take_tallies() == {}
    rules = RuleSet([TextOnly()])  # undecided for every answer
    assert values(rules, "text_only", ["a + ...", "5", "b + ..."]) == [None, 0.0, None]
    assert values(rules, "text_only", ["a + ...", "b + ..."]) == [None, None]


def test_an_ideal_that_raises_is_an_error_with_its_row():
    class Broken(TextOnly):
        def ideal(self, columns):
            raise KeyError("x")

    with pytest.raises(RuleError, match=r"ideal\(\) raised KeyError: 'x' \(row 0\)"):
        values(RuleSet([Broken()]), "broken", ["5"])


def test_on_unscored_is_error_or_warn():
    with pytest.raises(RuleError, match=r"on_unscored is 'stop'\. Give one of 'error', 'warn'"):
        RuleSet([Answer()], on_unscored="stop")
    rules = RuleSet.from_dict({"rules": [{"rule": "answer"}], "on_unscored": "warn"})
    assert rules.on_unscored == "warn" and rules.to_dict()["on_unscored"] == "warn"


def undecided_where_marked(row: Row) -> Verdict:
    return Verdict(None, "undecided", f"mark {row.columns['mark']}") if row.columns["mark"] else Verdict(1.0)


Undecided = rule_class("Undecided", undecided_where_marked, ("mark",))


def call(rules: RuleSet, marks: list[int], **more) -> list[float | None]:
    return rules(completions=["A: 18"] * len(marks), mark=marks, **more)


def test_an_undecided_row_is_left_out_of_the_total_and_its_share_is_logged():
    rules, metrics = RuleSet([Undecided(), Answer(weight=0.5)]), {}
    assert call(rules, [0, 1], answer=["18", "18"]) == [1.5, 0.5]
    assert call(RuleSet([Undecided()]), [0, 1, 2, 0], log_metric=metrics.__setitem__) == [1.0, None, None, 1.0]
    assert metrics["rules/undecided/undecided_frac"] == metrics["rules/undecided/none_frac"] == 0.5

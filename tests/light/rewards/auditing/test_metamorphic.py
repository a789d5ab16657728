"""Rewrites of right answers: what means the same must be paid, what means something else must not."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from trl_ext.rewards import Answer, Math, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.auditing.metamorphic import Metamorphic, rewrite_golds, several, uncomputed, wrong_values
from trl_ext.rewards.auditing.redteam import redteam
from trl_ext.rewards.auditing.redteam_rows import of_data

pytest.importorskip("math_verify")


@dataclass(frozen=True, slots=True)
class Lenient(Rule):
    """A rule that pays for any completion with the gold in it, or for any completion at all."""

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True
    gold: str = "answer"
    pays_all: bool = False

    @property
    def columns(self):
        return (self.gold,)

    @property
    def compares_values(self):
        return True

    def ideal(self, columns):
        return f"The answer is {columns[self.gold]}"

    def score(self, row: Row) -> Verdict:
        return Verdict(float(self.pays_all or row.columns[self.gold] in row.text), "ok")


def rewritten(rule: Rule, *golds: object, prompt: str = "?") -> Metamorphic:
    rules = RuleSet([rule], isolate=False)
    return rewrite_golds(rules, of_data(rules.rules, [{"prompt": prompt, "answer": gold} for gold in golds]))


def texts(rewrites) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rewrite in rewrites:
        found.setdefault(rewrite.how, []).append(rewrite.text)
    return found


def test_a_wrong_answer_is_made_of_a_right_one():
    assert texts(wrong_values("18")) == {
        "another digit": ["28", "19"],
        "another sign": ["-18"],
        "ten times": ["180"],
        "a chain with a wrong end": ["18 = 19"],
        "plus or minus": [r"\pm 18"],
    }
    assert texts(wrong_values(r"$\frac{1}{3}$"))["rounded"] == ["0.333"]
    assert texts(wrong_values("2x+1"))["another variable"] == ["2 y + 1"]
    assert texts(wrong_values("(0, 5]"))["another bracket"] == ["[ 0 , 5 ]"]
    assert texts(wrong_values("x > 3"))["relation turned"] == ["x < 3"]
    assert texts(wrong_values("1, 2, 3"))["a part left out"] == ["1, 2"]


@pytest.mark.parametrize("answer", ["0", "-0", r"\frac{0}{5}"])
def test_a_rewrite_with_the_same_value_is_not_harmful(answer):
    assert "another sign" not in texts(wrong_values(answer))


def test_another_digit_in_a_computation_may_lead_to_its_value_too():
    assert wrong_values(r"\cos(2\pi) = 1") == () and texts(wrong_values("x = 5")) == {"another digit": ["x = 6"]}


def test_work_is_put_back_into_a_right_answer():
    assert texts(uncomputed("18")) == {
        "0 added": ["18+0"], "multiplied by 1": [r"1 \cdot 18"], "a sum": ["17+1"], "a quotient": [r"\frac{36}{2}"],
        "the power 1": ["18^1"], "a root": [r"\sqrt{324}"], "a product": [r"2 \times 9"],
        "a sum with its sign": [r"\sum_{k=1}^{18} 1"],
    }  # fmt: skip
    assert texts(uncomputed(r"3\sqrt{2}")) == {
        "0 added": [r"3\sqrt{2}+0"],
        "multiplied by 1": [r"1 \cdot (3\sqrt{2})"],
    }


@pytest.mark.parametrize("answer", [r"2^3 \cdot 5", "1, 2", "5 apples", r"\text{east}", "{"])
def test_work_is_not_put_into_what_has_it_or_is_no_expression(answer):
    assert uncomputed(answer) == ()


def test_a_hedge_has_the_right_answer_between_wrong_ones():
    assert all("42" in hedge.text for hedge in several("42", "43", "39"))


@pytest.mark.parametrize("rule", [Math(), Answer()])
def test_our_rules_pay_every_harmless_rewrite_of_a_number_and_no_harmful_one(rule):
    found = rewritten(rule, "18", "-7", "0.75", "1250", "3/4")
    assert found.ok and found.num_harmless_paid == found.num_harmless > 10 and found.num_harmful > 60


def test_math_is_held_on_formulas():
    golds = (
        r"3\sqrt{13}",
        r"\frac{\pi}{2}",
        "x^2-5x+6",
        "(1, 2)",
        "x = 5",
        r"(0, 1) \cup [2, 3)",
        "(x-2)(x-3)",
        "2, -3",
    )
    found = rewritten(Math(), *golds)
    assert found.surprises == () and found.num_harmless > 30 and found.num_harmful > 50


def test_a_rule_that_pays_too_much_is_found_and_named():
    found = rewritten(Lenient(), "18")
    assert not found.ok and "0 added" in {one.how for one in found.surprises if one.harmful}
    assert "lenient, row 0: harmful and paid (several): 'The answer is 28, 18, 38'" in str(found.surprises[0])
    assert rewritten(Lenient(pays_all=True), "18").num_harmless_paid > 0


def test_a_rule_that_pays_its_golds_own_text_alone_is_found():
    found = rewritten(Lenient(), "3/4")
    assert found.num_harmless_paid < 0.98 * found.num_harmless
    assert (
        not Metamorphic(100, 97, 10, 0).ok and Metamorphic(100, 98, 10, 0).ok and not Metamorphic(100, 100, 10, 1).ok
    )


def test_who_pays_for_the_value_alone_is_not_asked_about_form():
    assert rewritten(Math(form="any"), "18").ok


def test_rows_without_a_short_gold_are_left_out():
    assert rewritten(Answer(kind="exact"), "word " * 60, None, ["a", "b"]) == Metamorphic()


def test_redteam_fails_on_a_harmful_rewrite_that_is_paid_and_shows_both_rates():
    report = redteam(RuleSet([Lenient()]), [{"prompt": "?", "answer": "18"}], cheats=[])
    assert not report.ok and not report.through
    assert "harmful rewrites of right answers: " in str(report) and "0 added" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["metamorphic"]["num_harmful_paid"] > 0


@pytest.mark.slow
def test_no_harmful_rewrite_of_real_golds_is_paid(data_dir):
    path = data_dir / "math500_first250.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()][:80]
    rules = RuleSet([Math()], isolate=False)
    found = rewrite_golds(
        rules, of_data(rules.rules, [{"prompt": row["problem"], "answer": row["answer"]} for row in rows])
    )
    assert found.ok, found.surprises[:5]
    assert found.num_harmful > 900 and found.num_harmless > 250

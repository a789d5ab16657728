"""Golds that nothing but their own text can be compared with: told from the gold, never from the completion."""

import pytest

from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.maths import Math

pytest.importorskip("math_verify")

UNREADABLE = [
    *(r"a_0+\ldots+a_n", r"\int_0^1 f(x)\,dx", "The sum is less than zero.", r"(1, a_1+\ldots+a_n)", "9^{9^9}"),
    *(r"\sum_{n=0}^{\infty} x^{n}", r"\forall x: 3^x \geq x^2"),
]
READABLE = r"5|3\sqrt{13}|x = 5|(1, 2)|\{1, 2\}|x > 3|\text{east}|\text{(C)}|52_8|2x + 3".split("|")
ANSWERS = [
    *("5", "x+1", r"\text{hm}", "(1,2)", "x > 7", r"\foo{3}", "1, 2", r"a_0+\ldots+a_m", "0", r"\frac{1}{0}"),
    r"\sum_{k=0}^\infty x^k",
]
MISSING = ["", "no idea", r"\boxed{}", r"\boxed{3} and \boxed{4}", r"<think>\boxed{3}"]
MISSING += [r"\boxed{" + "1+" * 1500 + "1}"]


def judge(text, gold, **fields):
    return Math(**fields).score(Row(None, text, None, {"answer": gold}))


@pytest.mark.parametrize("profile", ["train", "eval"])
@pytest.mark.parametrize("gold", UNREADABLE)
def test_any_answer_but_the_same_text_is_undecided(gold, profile):
    assert judge(rf"\boxed{{{gold}}}", gold, profile=profile).value == 1.0
    verdicts = {judge(rf"\boxed{{{answer}}}", gold, profile=profile) for answer in ANSWERS}
    assert {(verdict.value, verdict.status) for verdict in verdicts} == {(None, "undecided")}


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_missing_answer_earns_the_floor_whatever_the_gold(gold):
    assert {text: judge(text, gold).value for text in MISSING} == dict.fromkeys(MISSING, 0.0)


@pytest.mark.parametrize("gold", READABLE)
def test_no_answer_makes_a_readable_gold_undecided(gold):
    for text in (*(rf"\boxed{{{answer}}}" for answer in (*ANSWERS, *UNREADABLE)), *MISSING):
        assert judge(text, gold).value is not None, text


def test_the_detail_says_why():
    verdict = judge(r"\boxed{5}", r"a_0+\ldots+a_n")
    assert verdict.detail.endswith(r"only the gold's own text can be compared: '\ldots' is not understood")

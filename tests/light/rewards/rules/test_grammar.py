"""Grammar: seven signs of fluent prose."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import pytest

from trl_ext.rewards.rule import Row, Verdict
from trl_ext.rewards.rules.grammar import Grammar
from trl_ext.rewards.rules.relevance import Relevance

GOOD_ENGLISH = (
    "Let me think about this (briefly). The ducks lay 16 eggs a day, of which Janet eats three!\n\n"
    "- first, she bakes four\n- then she sells the rest\n\n"
    "So she makes $9 \\cdot 2 = 18$ dollars. In code that is `print(9 * 2)`, and the answer is:\n```\nprint(18\n```"
)
GOOD_CHINESE = (
    "我们先算出鸡蛋的总数。她每天吃三个（早餐），再用四个烤蛋糕，所以还剩九个！\n答案是 $9 \\times 2 = 18$ 美元。"
)


def judged(text: str, **fields) -> Verdict:
    return Grammar(**fields).score(Row(None, text, None, {}))


DEFECTS = {
    "starts": ("the answer is 18.", "The answer is 18. so it is."),
    "ends": ("The answer is\n\nSo eggs are what", "所以一共还剩九个鸡蛋"),
    "balance": ("The answer (in dollars is 18.", "The answer) is (18.", 'He said "18.', "答案「十八」」很清楚。"),
    "words": ("The answer xkcdq is 18.", "It is a1b2c3.", "The answer is heeeeey.", "The answer \ud800 is 18."),
    "punctuation": ("The answer is 18!!", "答案是十八。。", "The answer is.. 18."),
    "doubled": ("The the answer is 18.",),
    "spacing": ("The answer , they say, is 18.",),
}
RIGHT = (
    *(GOOD_ENGLISH, GOOD_CHINESE, "He had had enough of that that.", "Wait... is it $x$?"),
    *("1) First, add them.\n2) Then halve them.", "GPT4 runs on the H100 at NASA."),
    *("A wrapped line goes on\nwith a small letter.", "慢慢来，好好学习。", "It costs $5 and not $6."),
    *("# Heading without a full stop\nThe text has one.", "Вопрос решён: ответ равен восемнадцати."),
)


def test_each_defect_lowers_its_own_sign_and_no_other(subtests):
    for sign, texts in DEFECTS.items():
        for text in texts:
            with subtests.test(ascii(text)):
                verdict = judged(text)
                assert verdict.value < 1.0
                assert [part.split()[0] for part in verdict.detail.split(", ")] == [sign]


def test_what_is_right_is_no_defect(subtests):
    for text in RIGHT:
        with subtests.test(ascii(text)):
            assert judged(text) == Verdict(1.0, "ok", "all signs good")


def test_a_text_without_words_earns_the_floor(subtests):
    for text in ("", "...", "$x = 18$", "```\nprint(18)\n```", "((((", "\u200b", "😀"):
        with subtests.test(ascii(text)):
            assert (judged(text).value, judged(text).status) == (0.0, "no_answer")


def test_something_good_where_there_was_nothing_does_not_raise_the_value(subtests):
    text = "the the answer is 18"
    for added in (" ()", ' "18"', "\n- list", "\n\n# Heading", " [x]", "; yes"):
        with subtests.test(added):
            assert judged(text + added).value <= judged(text).value


@pytest.mark.parametrize(("kind", "blind"), [(Grammar, "knows no grammar"), (Relevance, "knows no meanings")])
def test_a_rule_says_once_when_it_is_built_what_it_cannot_see(kind, blind, caplog):
    with caplog.at_level("WARNING"):
        rules = [kind(name=f"blind_{kind.__name__}") for _ in range(3)]
    assert [blind in message for message in caplog.messages] == [True]
    assert rules[0].name in caplog.text and "judges.md" in caplog.text


def test_after_think_reads_the_answer_alone():
    text = "<think>hm the the xkcdq</think>The answer is 18."
    assert judged(text).value < judged(text, where="after_think").value == 1.0

"""The one reader of answers: the same text is read alike by `Answer` and by `Math`."""

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer, RuleSet
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.rules.maths import Math

# Beginnings and ends that negate something else: any of them goes with any announcement of 42.
BEGINNINGS = [
    *("There's no other way, so ", "She never eats eggs, so ", "That is wrong. ", "Because neither fits, ", ""),
    *("Nor does 41 fit; ", "I don't know a shorter way but ", "We do not need the last step and ", "No matter what, "),
    *("It's not hard to see that ", "If it weren't for tax, ", "You should not forget that ", "Other than that, "),
    *("Rather than 41, ", "Without the fee (not 5 dollars), ", "It is clear (if not obvious) that "),
]
MIDDLES = [
    *("the answer is 42", "the answer is $42$", r"the answer is $\boxed{42}$", r"we get \boxed{42}"),
    "the answer must be 42",
]
ENDS = [".", ". Not 41.", ". It is not 41.", ". This is not an estimate.", " (not 41)."]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_negation_around_an_announcement_denies_it(beginning):
    texts = [beginning + middle + end for middle in MIDDLES for end in ENDS]
    assert [text for text in texts if values(text) != (1.0, 1.0)] == []


def values(text: str, gold: str = "42") -> tuple[float | None, float | None]:
    row = Row(None, text, None, {"answer": gold})
    return Answer().score(row).value, Math().score(row).value


def chosen(text: str, letter: str) -> list[float | None]:
    row = Row(None, text, None, {"answer": letter, "maths": rf"\text{{({letter})}}"})
    return [Answer(kind="choice").score(row).value, Math().score(row).value, Math(gold="maths").score(row).value]


def test_choices_go_from_a_to_z_and_a_power_of_a_constant_is_none():
    for letter in "ABCDEFGHIJ":
        for text in (
            f"Answer: ({letter})",
            f"The answer is {letter}.",
            rf"\boxed{{{letter}}}",
            f"So {letter} is correct.",
        ):
            assert chosen(text, letter) == [1.0, 1.0, 1.0]
    for letter in "KRZ":
        for text in (f"Answer: ({letter})", f"The answer is {letter}.", rf"\boxed{{{letter}}}", f"({letter})"):
            assert chosen(text, letter)[0] == 1.0
    for text in (r"\boxed{C^2}", r"\boxed{C+1}", "The answer is $C^2$."):
        assert Math().score(Row(None, text, None, {"answer": "C"})).value == 0.0


HOSTILE = "answer: |not |not a |the answer to |is wrong that |A:\n|####|I choose |B is |is ".split("|")
ABROAD = "答案 |答案是不是|선택지는 |Ответ не — |antwort a b c |opción correcta |选项是|forty (4|1 234 |7:00 ".split(
    "|"
)


@pytest.mark.parametrize(
    "piece",
    [
        *HOSTILE,
        "(A) ",
        "\nanswer\n",
        "option ",
        "answer is 42 is ",
        *ABROAD,
        "B 或 ",
        '\n{"answer": ',
        "42, not ",
        "$1$ ",
    ],
)
def test_reading_takes_time_linear_in_the_text(piece):
    row = Row(None, piece * (60_000 // len(piece)), None, {"answer": "42", "letter": "B"})
    rules = [Answer(), Answer(gold="letter", kind="choice"), Math(), Math(gold="letter")]
    assert timed(lambda: [rule.score(row) for rule in rules])[1] < 1.0


def test_a_rule_set_pays_the_value_and_leaves_out_what_is_undecided():
    rules = RuleSet([Answer()], on_unscored="warn")
    texts = ["答案是3万", "答案是3万", "Die Antwort ist 1.234."]
    rewards = rules(prompts=["?"] * 3, completions=texts, answer=["30000", "3", "1234"])
    assert rewards == [1.0, 0.0, None]
    rules.close()

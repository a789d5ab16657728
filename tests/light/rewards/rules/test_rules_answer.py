"""Answer: what is read from a completion and from a gold column, and what is compared."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from trl_ext.rewards import Answer, Row, RuleSet
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.numbers import read_number

OK, NO_ANSWER, CONFLICT = "ok", "no_answer", "conflict"


def status_of(text: str, gold: object, **fields: str) -> str:
    return Answer(**fields).score(Row(None, text, None, {"answer": gold})).status


def test_an_announced_number_is_read(subtests):
    for text, number in (
        *(("#### 18", 18), ("The answer is 18.", 18), ("the answer is **18** eggs", 18)),
        *(("**Answer:** $1,234.50", Fraction(2469, 2)), ("16 - 3 = 13\nA: 13", 13), ("A:\n18", 18)),
        *((r"so \boxed{18}", 18), (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4))),
        *((r"\boxed{1\frac{1}{2}}", Fraction(3, 2)), (r"\boxed{10{,}000}", 10_000), (r"\boxed{3 \text{ cm}^2}", 3)),
        *((r"\boxed{x = 5}", 5), ("<answer>$18 a day.</answer>", 18), ("A: 2 * 9 = 18 dollars", 18)),
        *(("answer is - 3", -3), ("answer is \u2212 3", -3), ("A: 1.5e3", 1500), ("A: 1 1/2 cups", Fraction(3, 2))),
        *(("A: 50%", 50), ("答案是18元", 18), ("答案\uff1a\uff11\uff18", 18)),
    ):
        with subtests.test(text=text):
            assert read_number(text).value == number


def test_without_an_announcement_the_last_number_is_read(subtests):
    for text, number in (
        *(("16 - 3 = 13 eggs, so she earns $26.", 26), ("She has 18 apples, thanks to gpt4\nBye!", 18)),
        *(("所以一共有3个苹果", 3), ("10-5", 5), ("It is -$5", -5)),
    ):
        with subtests.test(text=text):
            assert read_number(text).value == number


def test_a_part_of_something_larger_is_not_taken_for_the_number(subtests):
    for status, texts in {
        NO_ANSWER: (
            *("", "no idea", "16 - 3 = 13\nA: unknown", r"\boxed{}", r"\boxed{18", "<answer>18"),
            *(r"\boxed{3\sqrt{13}}", r"\boxed{2^{10}}", r"\boxed{3x}", r"\boxed{(3, \infty)}", "it is 3 \\times 10^5"),
            *("A: 1/0", "A: " + "3" * 200, "<answer>9 eggs at 2 dollars</answer>"),
        ),
        CONFLICT: ("A: 3 or 5", "A: 5 = 3", r"\boxed{3, 5}"),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                reading = read_number(text)
                assert (reading.value, reading.status) == (None, status)


@pytest.mark.parametrize("kind", ["number", "choice", "exact"])
def test_a_thousand_boxes_in_boxes_are_a_conflict(kind):
    text = "\\boxed{" * 5000 + "B" + "}" * 5000
    assert status_of(text, "4" if kind == "number" else "B", kind=kind) == CONFLICT


def test_a_letter_is_read(subtests):
    for letter, texts in {
        "B": (
            *("B", "(B)", "B) Paris", "The answer is (B) Paris.", r"\boxed{\text{B}}", r"\boxed{\textbf{(B)}\ 12}"),
            *("<answer>b</answer>", "A: B"),
        ),
        "C": ("I would go with (C).", "答案是C"),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert read_choice(text).value == letter


def test_listing_the_options_is_no_choice(subtests):
    for status, texts in {
        NO_ANSWER: ("A dog ran", "the answer is a dog", "A: Paris\nB: London"),
        CONFLICT: ("The answer is A or B", "Answer: A, B, C", "(A) Paris (B) London"),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                reading = read_choice(text)
                assert (reading.value, reading.status) == (None, status)


def test_the_detail_says_what_was_read_and_where():
    verdict = Answer().score(Row(None, "A: 17", None, {"answer": "#### 18"}))
    assert verdict.detail == "'A:': 17; gold '####': 18"


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        pytest.skip(f"there is no {path}: set TRL_EXT_DATA to the folder that holds {path.name}")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_gold_is_right_when_compared_with_itself(data_dir):
    golds = [row["answer"] for row in read_rows(data_dir / "gsm8k_train.jsonl")]
    assert set(RuleSet([Answer()])(completions=golds, answer=golds)) == {1.0}


@pytest.mark.parametrize(("side", "value"), [("chosen", 1.0), ("rejected", 0.0)])
def test_labelled_solutions_get_their_label(data_dir, side, value):
    rows = read_rows(data_dir / "gsm8k_pairs_500q.jsonl")
    completions = [row[side] for row in rows]
    assert set(RuleSet([Answer()])(completions=completions, answer=[row["answer"] for row in rows])) == {value}

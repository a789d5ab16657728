"""Answer: what is read from a completion and from a gold column, and what is compared."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from trl_ext.rewards import Answer, Row, RuleSet
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.numbers import read_number

OK, NO_ANSWER, CONFLICT = "ok", "no_answer", "conflict"


def value_of(text: str, gold: object, **fields: str) -> float | None:
    return Answer(**fields).score(Row(None, text, None, {"answer": gold})).value


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


CHEATS = {
    NO_ANSWER: (
        # denied
        *("The answer is not 42.", "The answer isn't 42", "The answer is not $42$", r"The answer is not $\boxed{42}$"),
        *("The answer is no longer 42", "The answer is neither 41 nor 42", "The answer is other than 42"),
        *("The answer is \u2260 42", "The answer is 42 is wrong", "The answer is 42, not really"),
        *("I do not think that the answer is 42", "A: except 42", "not <answer>42</answer>"),
        *("<answer>anything but 42</answer>", "<answer>42 is wrong</answer>", r"\boxed{\text{not } 42}"),
        *(r"\boxed{x \neq 42}", "It is not 42.", "It is never 42", "答案不是42"),
        # another number, or a question
        *("The answer is half of 42", "The answer is 42 plus one", "The answer is > 42", "The answer is 42?"),
        *("A: 42 dollars and 5 cents", "<answer>42. 43</answer>"),
        # hidden
        *("<!-- 42 -->\nI do not know.", "I do not know. <!-- A: 42", '<answer value="42"></answer>'),
        *('<answer value=">42"></answer>', '<answer value="42"/>', "<answer 42></answer>"),
        # nested
        r"\boxed{42}{\boxed{",
        # equations that give no number
        *("<answer>5x - 7y + 11z + 4 = 42</answer>", r"\boxed{x + y = 42}", "A: 2x = 42", "A: " + "42=" * 50 + "42"),
    ),
    CONFLICT: (
        *(r"\boxed{43 \boxed{42} 39}", r"\boxed{43 \boxed{41} \boxed{42} 39}"),
        "<answer>43 <answer>42</answer> 39</answer>",
    ),
}


def test_a_number_that_is_denied_hidden_or_nested_earns_nothing(subtests):
    for status, texts in CHEATS.items():
        for text in texts:
            with subtests.test(text):
                assert (value_of(text, 42), status_of(text, 42)) == (0.0, status)


def test_a_number_with_its_unit_currency_or_equation_earns_all(subtests):
    for text in (
        *("42", "**42**", "42%", "so she has $42 left", "She does not eat 3, so she has 42"),
        *("The answer is 42 dollars.", "The answer is 42 dollars every day at the farmers' market."),
        *("The answer is therefore 42.", "The answer is USD 42", "The answer is (42).", "The answer is `42`."),
        *("The answer is 42 because 6 * 7 = 42.", "The answer is 42, since she does not eat."),
        *("The answer is 42. It is not 43.", "She does not eat, so the answer is 42."),
        *("The answer is: $\\boxed{42}$.", "The answer is <<6*7=42>>42.", "answer: 42 apples"),
        *("Final answer: **42 apples**", "Total = 42", "A: total cost = $42", "A: 6 x 7 = 42 dollars", "A: x_1 = 42"),
        *("<answer>\n42 dollars\n</answer>", "<answer>she has it\nA: 42</answer>", '<answer id="1">42</answer>'),
        *("<!-- a note -->\nA: 42", r"\boxed{\boxed{42}}", r"\boxed{42 \text{ square feet}}"),
        r"\boxed{6 \times 7 = 42}",
    ):
        with subtests.test(text=text):
            assert value_of(text, 42) == 1.0


def test_a_text_or_letter_that_is_denied_hidden_or_nested_earns_nothing(subtests):
    for kind, texts in {
        "choice": (
            *(r"\boxed{A \boxed{B} C}", r"\boxed{B \boxed{A}}", "<answer>A <answer>B</answer> C</answer>"),
            *("<answer>anything but B</answer>", "The answer is not B", r"The answer is not \boxed{B}"),
            *(r"\boxed{B is wrong}", "It is not (B)", "(B) is wrong", "<!-- (B) -->", '<answer value="B"></answer>'),
        ),
        "exact": (
            *(r"\boxed{A \boxed{B} C}", "<answer>A <answer>B</answer> C</answer>"),
            *("I do not think that the answer is B", "<!-- B -->", '<answer value="B"></answer>'),
        ),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert value_of(text, "B", kind=kind) == 0.0


@pytest.mark.parametrize("text", ["(B) Not enough information", "B. It is not known", r"\boxed{\boxed{B}}"])
def test_an_option_may_speak_of_a_denial(text):
    assert value_of(text, "B", kind="choice") == 1.0


@pytest.mark.parametrize("kind", ["number", "choice", "exact"])
def test_a_thousand_boxes_in_boxes_are_a_conflict(kind):
    text = "\\boxed{" * 5000 + "B" + "}" * 5000
    assert status_of(text, "4" if kind == "number" else "B", kind=kind) == CONFLICT


def test_which_number_is_read_and_how_it_is_compared(subtests):
    for text, gold, value in (
        *((r"\boxed{12}. Wait, the answer is 18.", 18, 1.0), ("The answer is 18.\nQ: next?\nA: 5", 18, 0.0)),
        ("A: 18\nThat took 3 steps.", 18, 1.0),  # An announcement wins over a later number.
        ("#### Step two\nShe earns 18", 18, 1.0),  # A heading of Markdown is no announcement.
        *(("A: 0.5", "1/2", 1.0), ("A: 0.33", "1/3", 0.0)),  # Numbers are compared exactly.
        *(("A: 50", "50%", 1.0), ("A: 0.5", "50%", 0.0)),  # A percent sign is dropped, not converted.
        *((r"<think>\boxed{18}</think> I do not know", 18, 0.0), (r"<think>so A: 18", 18, 0.0)),
        ("<think>3</think> A: 18", 18, 1.0),
        ("<answer>5x - 7y + 11z + 4 = 0</answer>", 0, 0.0),  # An equation in several variables is no number.
    ):
        with subtests.test(text, gold=gold):
            assert value_of(text, gold) == value


@pytest.mark.parametrize("gold", [18, 18.0, "18", "$18.00", "9 * 2 = 18\n#### 18", r"\boxed{18}", "A: 18"])
def test_every_usual_spelling_of_a_gold_is_read(gold):
    assert value_of("The answer is 18.", gold) == 1.0


@pytest.mark.parametrize("gold", [None, True, float("nan"), "", "eggs", r"3\sqrt{13}", "(1, 2)", "She has 3", []])
def test_a_gold_that_cannot_be_read_has_no_value(gold):
    assert (value_of("A: 3", gold), status_of("A: 3", gold)) == (None, "gold_invalid")


def test_where_all_reads_the_thoughts_too():
    assert value_of(r"<think>\boxed{18}</think>", 18, where="all") == 1.0


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


def test_golds_in_brackets_are_numbers():
    for gold, right, wrong in (("4(4/5)", "24/5", "16/5"), ("(1/10)", "0.1", "1"), ("9 (apples)", "9", "8")):
        assert value_of(rf"\boxed{{{right}}}", gold) == value_of(f"<answer>{gold}</answer>", gold) == 1.0
        assert value_of(rf"\boxed{{{wrong}}}", gold) == 0.0


def test_a_box_without_a_digit_does_not_hide_an_announced_number():
    assert value_of(r"\boxed{H}. The answer is 42.", "42") == 1.0
    assert value_of(r"\boxed{3\sqrt{13}}. The answer is 3.", "3") == 0.0


def test_a_choice_gold_may_carry_its_text():
    assert value_of("B", "B. Paris", kind="choice") == 1.0
    assert value_of("B", 1, kind="choice") is None


def test_exact_ignores_case_spacing_and_surrounding_punctuation_but_not_signs_and_brackets(subtests):
    for text in ("new york", "The answer is **New  York**.", "\u201cNew York\u201d!", "A: NEW YORK"):
        with subtests.test(text):
            assert value_of(text, "New York", kind="exact") == 1.0
    for text, gold, value in (("-3", "3", 0.0), ("[1,2]", "(1,2)", 0.0), ("答案是北京\u3002", "北京", 1.0)):
        with subtests.test(text):
            assert value_of(text, gold, kind="exact") == value


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

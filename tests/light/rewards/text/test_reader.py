"""The one reader of answers: the same text is read alike by `Answer` and by `Math`."""

# ruff: noqa: RUF001  Chinese punctuation.

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.rules.maths import Math

pytest.importorskip("math_verify")

# The right answer is 42, and the sentence negates something else.
NEGATED_ELSEWHERE = [
    *("The answer is 42, not 41.", "The answer is 42 and not 41.", "The answer is 42 rather than 41."),
    *("The answer is 42 instead of 41.", "The answer is 42 (not 41).", "The answer is $42$, not $41$."),
    *("The answer is not 41 but 42.", "It is not 41, so the answer is 42.", "41 does not work so the answer is 42."),
    *("41 is wrong. The answer is 42.", "41 is wrong, so the answer is 42."),
    *("She does not eat the rest, so the answer is 42.", "Since we do not count zero, the answer is 42."),
    *("Because they never meet, the answer is 42.", "As 5 isn't even the answer is 42."),
    *("There is no remainder, hence the answer is 42.", "No other value works. The answer is 42."),
    "I first thought that it was 41, which is not right; the answer is 42.",
    *("We cannot use the first case, therefore the answer is 42.", "It doesn't matter which, the answer is 42."),
    *("The answer is 42, which is not prime.", "The answer is 42 because 41 is wrong."),
    *("The answer is 42 even though it does not look like it.", "The answer is 42, not counting the first one."),
    *("The answer is 42. It cannot be 41.", "I am not sure, but the answer is 42."),
    *("I did not make an error: the answer is 42.", "If we do not count the first, the final answer is: 42"),
    *("The answer isn't 41. The answer is 42.", "So she has 42, not 41.", "The number that is not used is 42."),
]
NEGATED_BESIDE_A_BOX = [
    *(r"Since order doesn't matter, the answer is $\boxed{42}$.", r"41 does not work so the answer is \boxed{42}."),
    *(r"It is not 41, it is \boxed{42}.", r"The answer is \boxed{42}, not 41."),
    *(r"The answer is not 41 but \boxed{42}.", r"41 is wrong, and the answer is $\boxed{42}$."),
    *(r"As the lines never meet, there are \boxed{42}", r"We can't have 41, so the answer is $\boxed{42}$."),
    *(r"Zero is not allowed, leaving $\boxed{42}$ numbers.", r"the only number that is not prime is \boxed{42}"),
    r"I don't see another case, so the final answer is $\boxed{42}$.",
    *(r"Neither of them is 41, so we get \boxed{42}.", r"No solution other than this one works: \boxed{42}"),
    *(r"The result is $\boxed{42}$, which is not a multiple of 4.", r"\boxed{42}. This answer is not rounded."),
    *(r"\boxed{42} is not divisible by 4.", r"2!=2, so 21 * 2!=\boxed{42}"),
    r"The answer is $\boxed{42}$. I hope that this answer is helpful.",
]
STYLES = [
    *("42", "**42**", "$42$", "The answer is 42.", "The answer is: 42", "The answer is:\n\n42"),
    *("The answer is\n\n42.", "The answer is\n\\[42\\]", "The final answer is:\n\\[\n42\n\\]"),
    *("The final answer is $$42$$", "**Answer:** 42", "**Answer**: 42", "**Final Answer**\n\n42", "## Answer\n42"),
    *("### Final Answer:\n\n**42**", "**Final Answer**\n\\[\\boxed{42}\\]", "- Answer: 42"),
    *("1. First step\n2. **Answer: 42**", "Answer:\n- 42", "Answer = 42", "ANSWER: 42"),
    *("Final Answer: The largest $n$ is 34 + 8 = 42.", "Final Answer: The largest n is 42."),
    *("Final Answer: The largest $n$ is $42$.", "Final Answer: The final answer is $42$. I hope it is correct."),
    "Final Answer: She has 42 apples left.",
    *("Final Answer: Jane started growing Sphere 42 hours ago. I hope it is correct.", "so the area is 42m²."),
    *("Answer: Janet makes $42 every day at the farmers' market.", "Answer: The total cost is $42."),
    *("Answer: $n = 42$", "The answer to the question is 42.", "The correct answer is 42.", "The answer would be 42."),
    *("The answer is **42** dollars.", "The answer is $42 dollars.", "The answer is $42$ hours."),
    *(r"The answer is $42$ square units.", r"The answer is \(42\).", r"The answer is $\mathbf{42}$."),
    *("The answer is therefore 42.", "The answer is 42 eggs per day.", "The answer is 42%"),
    *("The answer is 42 percent.", "#### 42", "####42", "so 6 * 7 = 42\nA: 42", "<answer>42</answer>"),
    *("<answer>The answer is 42</answer>", "<answer>\n\\boxed{42}\n</answer>", "<answer>She has 42 apples.</answer>"),
    *("<think>43?</think>\n<answer>42</answer>", "So she has 42 left."),
    *("Therefore, Janet makes **$42** every day at the farmers' market.", "Therefore, the value of x is:\n\n42"),
    *("Therefore, 42 is the answer.", "The answer is, 42.", "The answer comes out to 42."),
    *("The answer turns out to be 42.", "The answer is 42 or 42.0.", "The answer is $42$ (or 42.0)."),
    *("The answer is 42.\n\nNote: we assumed 7 days and 6 hours.", "### Answer\n\n$$\n42\n$$", '{"answer": 42}'),
    *("Answer: Rs. 42", "= 42", r"Hence $x = 42$.", r"\boxed{12}. Wait, the answer is 42."),
    *(r"The answer is 12. No: \boxed{42}", r"I get \boxed{42}, and so \boxed{42}."),
    *(r"We need $6 \cdot 7 = \boxed{\phantom{2}}$, that is \boxed{42}", r"Fill in \boxed{\quad}: \boxed{42}"),
    *("**Answer:**\nJanet sells 16 - 3 - 4 = 9 eggs.\nShe makes 9 * 2 + 24 = 42 dollars", "答案是42。"),
]
# Denied, hedged or hidden: no such text may be paid for 42.
UNPAID = [
    *("The answer is not 42.", "The answer isn't 42.", "The answer isn\u2019t 42.", "The answer is certainly not 42."),
    *("The answer cannot be 42.", "The answer is never 42", "The answer is anything but 42."),
    *("The answer is not the number 42.", "I do not think that the answer is 42.", "I don't believe it is 42."),
    *(r"I don't believe that it is \boxed{42}.", "It is wrong that the answer is 42."),
    *("It is not true that the answer is 42.", "It is not the case that the answer is 42."),
    *(r"It is false to say that the answer is $\boxed{42}$.", r"\boxed{42} is wrong."),
    *(r"\boxed{42} is not the answer.", "The answer is 42, not really.", "The answer is 42 is false"),
    *("The answer is 41, not 42.", "The answer is 41 rather than 42.", "The answer is not 42 but 41."),
    *("So she has 41, not 42.", "The answer is 42 or 43.", "The answer is 41 or 42.", "The answer is 41, 42 or 43."),
    *("The answer is $42$ or $43$.", "The answer is 42/43", "The answer is between 41 and 42"),
    *("The answer is half of 42", "I don't think it's 42.", "I'm not convinced the answer is $42$."),
    *("I doubt that the answer is 42.", "The answer differs from 42.", "The answer is everything but 42."),
    *("The answer is hardly 42.", "The answer is 42, or not.", "The answer is 42: false.", "The answer is $42$? No."),
    *(r"\boxed{42}? No.", r"\boxed{42} can't be right.", "The answer is $42$ squared", "The answer is 42 cubed"),
    *("The answer is $42$ + 1", "The answer is 42 (or 43)", "The answer is $42$ (or 43)", "The answer is 42; or 43"),
    *("Answer: Jane is older than 42", "Answer: Not a number such as 42", "Answer: Jane sold 42 of 43"),
    *("The answer is 42 million", "The answer is $42$ million.", "The answer is 42 dozen"),
    *("The answer is 42 and a half", r"\boxed{42} or \boxed{43}", r"\boxed{41} \boxed{42}"),
    *("<answer>42</answer><answer>43</answer>", "<answer>42. 43</answer>", r"\boxed{43 \boxed{42}}", r"\boxed{42"),
    *(r"\boxed{\phantom{42}}", "<answer>42", r"<think>\boxed{42}</think> I do not know"),
    *("<!-- The answer is 42 --> I do not know", '<answer value="42"></answer>', "A: unknown\n"),
    *(r"\boxed{42}. No, the answer is 43.", r"\boxed{42}. No, the answer is not 42."),
]


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


@pytest.mark.parametrize("text", NEGATED_ELSEWHERE + NEGATED_BESIDE_A_BOX)
def test_only_a_direct_negation_denies_an_answer(text):
    assert values(text) == (1.0, 1.0)


@pytest.mark.parametrize("text", STYLES)
def test_answers_are_found_in_the_styles_of_real_models(text):
    assert values(text) == (1.0, 1.0)


@pytest.mark.parametrize("text", UNPAID)
def test_what_denies_or_hedges_earns_nothing(text):
    assert values(text) == (0.0, 0.0)


def test_multiples_thousands_and_halves_are_numbers(subtests):
    for text, gold in (
        *(("The answer is 42 million.", "42000000"), ("The answer is $42$ million dollars", "42,000,000")),
        *((r"\boxed{42 \text{ million}}", "42,000,000"), ("Answer: about 1.5 thousand people", "1500")),
        *(("The answer is 3 dozen eggs", "36"), ("So they sold 3 million cars", "3000000")),
        *(("The answer is half.", "1/2"), ("The answer is \u00bd.", "1/2")),
        *(("The answer is $\\frac12$ or $0.5$.", "1/2"), ("The answer is 1/2 (or 0.5).", "1/2")),
        *(("So $P=\\frac12$ is the answer.", "1/2"), ("The answer is one half", "0.5")),
        *(("The answer is 2 and a half", "2.5"), ("The answer is 1,234,567.", "1234567")),
        *(("The answer is $1,234.50.", "1234.5"), (r"The answer is $12{,}000$", "12000"), ("The answer is -3", "-3")),
        ("The answer is 3/4 of the cake.", "3/4"),
    ):
        with subtests.test(text=text):
            assert values(text, gold) == (1.0, 1.0)


CHOSEN = [
    *("B", "(B)", "**B**", "B.", "B) Paris", "(B) Paris", "**B) Paris**", "The answer is B", "The answer is (B)."),
    *("The answer is: B", "The answer is: (B)", "The correct answer is: **B) Paris**"),
    *("The correct answer is:\n\nB) Paris", "The correct answer is:\n\n**(B) Paris**", "Answer: B", "Answer: (B)"),
    *("Answer (B)", "**Answer:** B. Paris", "**Final Answer**\n\nB", "Final Answer: The correct option is B."),
    *("Option B", "Option (B) fits best.", "The correct option is B.", "The correct choice is **(B)**."),
    *("The answer is option B.", "I choose B.", "I would choose option B, because A is wrong.", "We select (B)."),
    *("I'll go with B.", "So B is correct.", "So (B) Paris is the correct answer."),
    *("Therefore, B is the right answer.", "The answer is $B$.", r"The answer is \(\text{B}\).", r"\boxed{B}"),
    *(r"\boxed{\text{B}}", r"$\boxed{\textbf{(B)}\ 12}$", r"\boxed{B. Paris}", "<answer>B</answer>"),
    *("<answer>(B) Paris</answer>", "<answer>The answer is B.</answer>", "It is not (A), so the answer is (B)."),
    *("(A) is wrong and (C) is wrong, so it is (B).", "The answer is B, not A.", "The answer is B rather than C."),
    *("A does not fit. The answer is B.", "The answer is B. Option A is tempting but false."),
    *("The answer is 12, which is option B.", "We look at the map.\n\nB", "答案是B", "选B", "B: Paris"),
    *("**B**: Paris", "B - Paris", "It's B.", "A and C are wrong. Thus B.", "Correct option: B", "The answer is 'B'"),
    *("(b)", "The best answer is B.", "The correct answer is:\n\n**B. Paris**\n\nExplanation: A is wrong because ..."),
    *("The statement that is true is: B. All are made by mutation.", r"\text{The answer is } (B)"),
    *(
        "因此，选项B是最合理的答案。",
        "选项A不对。所以，错误的叙述是选项B。",
        "只有B选项符合题意。",
        "综上，选（B选项）。",
        "故选B。",
    ),
    *(
        "A是正确的叙述。所以，错误的叙述是选项B。",
        r"$=\boxed{100}$. The answer is (B).",
        "The answer is B. \\boxed{100}",
    ),
    *("<answer>100</answer> The answer is (B).", "\\boxed{100}\n\nSo the correct option is **B**."),
    *("Eliminating (A), (C) and (D), the answer is (B).", "The statement in option A is false. Answer: B"),
]
UNCHOSEN = [
    *("The answer is not B.", "The answer is A, not B.", "The answer is A or B.", "The answer is B or C", "A | B"),
    *("The answer is B | C", "Answer: A, B, C", "(A) (B) (C)", "Option A, option B", "B is wrong.", "(B) is wrong"),
    *("I do not think that B is correct.", "Neither A nor B is correct.", "B is not correct."),
    *(r"\boxed{A} or \boxed{B}", r"\boxed{A, B}", "A: Paris\nB: London", "A\nB\nC", "A dog", "Not B.", "It's not B."),
    *("不选B", "Neither (A) nor (B)", "Anything but B", "The answer is B and C", "The answer is AB"),
    *(
        "因此，选项 A、B、C、D 都不正确。",
        "选项B、C、D均错误",
        "None of the options A, B is correct.",
        "A, B and C are all wrong.",
    ),
    *("(B) is a distractor.", "I'd rule out (B).", "因此选项B错误。", "所以不选B。", "综上，应排除B。"),
    *(
        "A. 1\nB. 2\nC. 3",
        "Answer: A. 1 B. 2 C. 3",
        r"\boxed{100}",
        r"\boxed{A}. The answer is B.",
        r"\boxed{B^2}. The answer is B.",
    ),
    *("Maybe B, maybe A.", "The answer is a dog.", "<!-- B -->"),
]


def chosen(text: str, letter: str) -> list[float | None]:
    row = Row(None, text, None, {"answer": letter, "maths": rf"\text{{({letter})}}"})
    return [Answer(kind="choice").score(row).value, Math().score(row).value, Math(gold="maths").score(row).value]


@pytest.mark.parametrize("text", CHOSEN)
def test_a_choice_is_found_in_every_usual_spelling(text):
    assert chosen(text, "B") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("text", UNCHOSEN)
def test_a_choice_that_is_denied_or_hedged_earns_nothing(text):
    assert chosen(text, "B") == [0.0, 0.0, 0.0]


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


def test_several_boxes_are_the_parts_of_a_gold_that_is_a_list():
    for gold in ("1, 2", r"\{1, 2\}", r"x = \boxed{2} and $x = \boxed{1}$"):
        for text in (r"\boxed{1} and \boxed{2}", r"\boxed{2}, \boxed{1}", r"\boxed{1, 2}"):
            assert Math().score(Row(None, text, None, {"answer": gold})).value == 1.0
        for text in (r"\boxed{1}", r"\boxed{1} or \boxed{3}", r"\boxed{1} \boxed{2} \boxed{3}"):
            assert Math().score(Row(None, text, None, {"answer": gold})).value == 0.0


def test_formulas_lists_and_names_are_found(subtests):
    for text, gold in (
        *(("The answers are 1 and 2.", "1, 2"), ("The answer is $x=1$ and $x=2$.", "1, 2")),
        *(("The expression simplifies to:\n\\[\nx^2+1\n\\]", "x^2+1"), ("It is\n$$\nx^2+1.\n$$", "x^2+1")),
        ("Final Answer: The polynomial is $x^2+1$.", "x^2+1"),
        ("So the answer is $\\boxed{x^2+1}$ for all $x$.", "x^2+1"),
        *(("The answer is $3\\sqrt{2}$ meters.", r"3\sqrt2"), ("Evelyn", r"\text{Evelyn}")),
        ("The answer is **Evelyn**.", r"\text{Evelyn}"),
    ):
        with subtests.test(text=text):
            assert Math().score(Row(None, text, None, {"answer": gold})).value == 1.0


def test_two_answers_are_no_list_where_the_gold_is_one_and_the_last_box_wins_where_asked_for():
    assert Math().score(Row(None, "The answers are 1 and 2.", None, {"answer": "1"})).status == "conflict"
    row = Row(None, r"\boxed{1} and \boxed{2}", None, {"answer": "2"})
    assert [Math(multiple=way).score(row).value for way in ("reject", "list", "last", "all_equal")] == [0, 0, 1, 0]


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

r"""Mathematics in plain text (`2sqrt(3)`, `3 pi`) is read as mathematics, or not at all: never as its first number."""

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer, Math, Row

pytest.importorskip("math_verify")

# For each expression the gold that `Math` pays; None where it is not read. No number in it is ever paid.
EXPRESSIONS = {
    "2sqrt(3)": r"2\sqrt{3}",
    "2 sqrt(3)": r"2\sqrt{3}",
    "2*sqrt(3)": r"2\sqrt{3}",
    "2sqrt3": r"2\sqrt{3}",
    "3sqrt13": r"3\sqrt{13}",
    "2sqrt{3}": r"2\sqrt{3}",
    "3 sqrt(13)/2": r"\frac{3\sqrt{13}}{2}",
    "1/sqrt(pi)": r"\frac{1}{\sqrt{\pi}}",
    "1/sqrt(2)": r"\frac{1}{\sqrt2}",
    "sqrt(3)/2": r"\frac{\sqrt3}{2}",
    "1 + sqrt(5)": r"1+\sqrt5",
    "(1 + sqrt(5))/2": r"\frac{1+\sqrt5}{2}",
    "4^(1/3) sqrt(7)": None,
    "2 sin(x)": r"2\sin x",
    "3cos(x)": r"3\cos x",
    "2 ln(3)": r"2\ln 3",
    "5 log(x)": r"5\log x",
    "7 exp(x)": r"7e^x",
    "3 tan(2)": r"3\tan 2",
    "3 pi": r"3\pi",
    "3*pi": r"3\pi",
    "3pi": r"3\pi",
    "3 pi/4": r"\frac{3\pi}{4}",
    "1/e": r"\frac1e",
    "7 e": "7e",
    "1/pi": r"\frac1\pi",
    "2 x": "2x",
    "5 factorial": None,
    "4 raised to n": None,
    "1 over sqrt(pi)": None,
    "1 over e": None,
    "1 divided by sqrt(2)": None,
    "2 times sqrt(3)": None,
    "2 times the square root of three": None,
    "2 times the square root of 3": None,
    "2 root 3": None,
    "2 square root of 3": None,
    "3 times pi": None,
    "3 multiplied by x": None,
    "7 cubed": None,
    "42 doubled": None,
    "42 halved": None,
    "42 more than x": None,
    "2 to the n": None,
    "2 to the power of three": None,
    "10 raised to the fourth": None,
    "5 cbrt(2)": None,
    "2 Sqrt(3)": None,
    "3 f(x)": None,
    "3 sec(x)": None,
    "2 arctan(3)": r"2\arctan 3",
    "6 theta": r"6\theta",
    "4 log x": r"4\log x",
    "2 sin theta": r"2\sin\theta",
    "3 choose n": None,
    "5 mod p": None,
    "8 per sqrt(n)": None,
}
WAYS = (
    *("The answer is {}.", "Answer: {}", "**Final Answer:** {}", r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}"),
    *("A: {}", "Final Answer: The length is {}.", "So we get {}.", "Therefore x = {}", "The answer is ${}$.", "{}"),
)


@pytest.mark.parametrize("written", EXPRESSIONS)
def test_no_number_in_it_is_paid(written):
    numbers = {"".join(c if c.isdigit() else " " for c in written).strip().split(" ")[place] for place in (0, -1)}
    paid = [
        (rule.name, way, gold)
        for way in WAYS
        for gold in numbers
        for rule in (Answer(), Math())
        if rule.score(Row(None, way.format(written), None, {"answer": gold})).value != 0.0
    ]
    assert paid == []


@pytest.mark.parametrize(("written", "gold"), [(one, gold) for one, gold in EXPRESSIONS.items() if gold])
def test_it_is_read_as_mathematics_where_that_is_certain(written, gold):
    for way in WAYS[:7]:
        verdict = Math().score(Row(None, way.format(written), None, {"answer": gold}))
        assert verdict.value == 1.0, (way, verdict)


def test_a_decimal_behind_it_is_no_second_answer():
    for text in ("The answer is 2sqrt(3), which is about 3.46.", "Answer: 2sqrt(3) or approximately 3.46"):
        values = [
            Math().score(Row(None, text, None, {"answer": gold})).value for gold in (r"2\sqrt{3}", "2", "3", "3.47")
        ]
        assert values == [1.0, 0.0, 0.0, 0.0]


def test_units_and_words_behind_a_number_are_no_mathematics(subtests):
    for text in (
        *("42 apples", "42 sec", "42 hours a day", "42 more apples", "42 min"),
        *("42 hour(s)", "42 log entries", "42 tan shoes", "42 roots", "42 more than Jim", "42 over the whole week"),
        *("42 times", "42 times as many", "42 square feet", "42 cubes", "42 pies", "42 exposures", "42 sinks"),
        *("42 to the nearest dollar", "42 pints", "42 powerful men", "42 e-mails", "42 per person"),
    ):
        for way in ("The answer is {}.", "Final Answer: She has {}.", "So she has {}."):
            with subtests.test(text=way.format(text)):
                for rule in (Answer(), Math()):
                    assert rule.score(Row(None, way.format(text), None, {"answer": "42"})).value == 1.0


def test_plain_golds_are_the_same_as_latex_ones():
    for plain, latex in (("2sqrt(3)", r"2\sqrt{3}"), ("1/sqrt(pi)", r"\frac{1}{\sqrt{\pi}}"), ("3 pi", r"3\pi")):
        assert Math().score(Row(None, rf"\boxed{{{latex}}}", None, {"answer": plain})).value == 1.0
        assert Math().score(Row(None, r"\boxed{2}", None, {"answer": plain})).value == 0.0


@pytest.mark.parametrize("piece", ["2sqrt(", "sqrt(3) + ", "2 sin ", "root of ", "5 factorial ", "1/e "])
def test_reading_it_takes_time_linear_in_the_text(piece):
    row = Row(None, piece * (60_000 // len(piece)), None, {"answer": "42"})
    assert timed(lambda: [rule.score(row) for rule in (Answer(), Math())])[1] < 1.0

r"""Mathematics in plain text (`2sqrt(3)`, `3 pi`) is read as mathematics, or not at all: never as its first number."""

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer, Math, Row

# For each expression the gold that `Math` pays; None where it is not read. No number in it is ever paid.
EXPRESSIONS: dict[str, str | None] = {
    "2sqrt(3)": r"2\sqrt{3}", "2 sqrt(3)": r"2\sqrt{3}", "2*sqrt(3)": r"2\sqrt{3}", "2sqrt3": r"2\sqrt{3}",
    "3sqrt13": r"3\sqrt{13}", "2sqrt{3}": r"2\sqrt{3}", "3 sqrt(13)/2": r"\frac{3\sqrt{13}}{2}",
    "1/sqrt(pi)": r"\frac{1}{\sqrt{\pi}}", "1/sqrt(2)": r"\frac{1}{\sqrt2}", "sqrt(3)/2": r"\frac{\sqrt3}{2}",
    "1 + sqrt(5)": r"1+\sqrt5", "(1 + sqrt(5))/2": r"\frac{1+\sqrt5}{2}", "2 sin(x)": r"2\sin x",
    "3cos(x)": r"3\cos x", "2 ln(3)": r"2\ln 3", "5 log(x)": r"5\log x", "7 exp(x)": r"7e^x", "3 tan(2)": r"3\tan 2",
    "3 pi": r"3\pi", "3*pi": r"3\pi", "3pi": r"3\pi", "3 pi/4": r"\frac{3\pi}{4}", "1/e": r"\frac1e", "7 e": "7e",
    "1/pi": r"\frac1\pi", "2 x": "2x", "2 arctan(3)": r"2\arctan 3", "6 theta": r"6\theta", "4 log x": r"4\log x",
    "2 sin theta": r"2\sin\theta",
}  # fmt: skip
UNREAD = (
    "4^(1/3) sqrt(7)|5 factorial|4 raised to n|1 over sqrt(pi)|1 over e|1 divided by sqrt(2)|2 times sqrt(3)|"
    "2 times the square root of three|2 times the square root of 3|2 root 3|2 square root of 3|3 times pi|"
    "3 multiplied by x|7 cubed|42 doubled|42 halved|42 more than x|2 to the n|2 to the power of three|"
    "10 raised to the fourth|5 cbrt(2)|2 Sqrt(3)|3 f(x)|3 sec(x)|3 choose n|5 mod p|8 per sqrt(n)"
).split("|")
EXPRESSIONS |= dict.fromkeys(UNREAD)
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


@pytest.mark.parametrize("piece", ["2sqrt(", "sqrt(3) + ", "2 sin ", "root of ", "5 factorial ", "1/e "])
def test_reading_it_takes_time_linear_in_the_text(piece):
    row = Row(None, piece * (60_000 // len(piece)), None, {"answer": "42"})
    assert timed(lambda: [rule.score(row) for rule in (Answer(), Math())])[1] < 1.0

r"""Golds as data sets write them: with rates, times of day, names of points, letters of options, debris, words."""

import pytest

from trl_ext.rewards import Math, Row

pytest.importorskip("math_verify")

# gold: (right answers, wrong answers); the gold's own text is right as well.
GOLDS = {
    # In brackets
    "4(4/5)": ([r"\frac{24}{5}", r"4\frac45", "4.8"], [r"\frac{16}{5}", "4", r"\frac45"]),
    "(1/10)": ([r"\frac{1}{10}", "0.1"], ["1", "10"]),
    "9 (apples)": (["9", r"9\text{ apples}"], ["8", r"9\text{ pears}"]),
    # Rates and compound units
    r"80 \ \text{km/h}": (
        ["80", "80 km/h", r"80\text{ kilometers per hour}", r"80 \text{ km}/\text{h}"],
        ["81", r"80 \text{ m/s}", r"80\text{ km}"],
    ),
    r"9 \text{ m/s^2}": (["9", r"9 \text{ m/s}^2"], [r"9 \text{ m/s}", "81"]),
    r"7 \, \text{cm^3}": ([r"7\text{ cm}^3", r"7 \text{ cubic cm}"], [r"7\text{ cm}^2"]),
    "42": (["42 km/h", "42 m/s", r"42\text{ dollars per hour}", r"42\text{-seat buses}"], ["3 am 42", "42 h/km/2"]),
    r"60\text{-seat coaches}": (["60", r"60\text{ coaches}"], ["61", r"60\text{ drivers}"]),
    "2 hours 15 minutes": ([r"2 \text{ hours } 15 \text{ minutes}"], ["2", "2 hours 16 minutes"]),
    # Times of day
    r"\text{6:40 p.m.}": (
        ["6:40", r"6:40 \text{ p.m.}", "6:40 PM", r"\text{6:40 pm}"],
        ["6:41", "6:40 a.m.", r"6:40\text{ AM}", "640", "6"],
    ),
    "7:15": ([r"7:15\text{ p.m.}", "7:15 a.m."], ["7:16", r"7\text{ p.m.}"]),
    r"8\text{ a.m.}": (["8 a.m.", "8"], ["8 p.m.", "9 a.m."]),
    # Points
    "A(0, 2)": (["(0,2)", "A = (0,2)", r"A\left(0, 2\right)"], ["B(0,2)", "(2,0)", "A(2, 0)", "2"]),
    "A(0,1), B(2,3)": (["(0,1), (2,3)", "B(2,3), A(0,1)"], ["(2,3), (0,1)", "A(2,3), B(0,1)"]),
    r"F(\pm 3, 0)": ([r"(3,0), (-3,0)"], ["(3,0)", "(0,3)"]),
    # Letters of options
    r"(D) [1, 2)": (["D", "(D)", "[1,2)", r"(D) [1,2)", r"1 \leq x < 2"], ["C", "(C) [1,2)", "(D) [1,3)", "[1,2]"]),
    r"B. \frac{1}{2}": ([r"\frac12", "B", r"\text{B. } \frac12"], ["2", "A"]),
    r"\text{C: } \{0, 1\}": ([r"\{1, 0\}", "C"], [r"\{0\}", "B"]),
    "A: 4": (["4", "A: 4"], ["A", "A: 5"]),
    "A: 3, B: 4": ([], ["3", "A", "A: 4, B: 3"]),
    # Debris
    "45^\n": (["45", r"45^\circ"], ["4", "5", r"46^\circ"]),
    "60^\textcirc": ([r"60^\circ", "60"], ["6"]),
    "\text{sunday}": ([r"\text{Sunday}"], [r"\text{Monday}"]),
    r"90\u00B0": ([r"90^\circ", "90"], ["9"]),
    "B = {0, 2, 4}": ([r"\{4, 2, 0\}"], [r"\{0, 2\}"]),
    r"[1, \sqrt{2}]}": ([r"[1,\sqrt2]"], [r"[1,2]"]),
    r"\text{Answer: } -7": (["-7"], ["7"]),
    r"-\\frac{1}{3} \\leqslant m": ([r"m \geq -\frac13"], [r"m \geq \frac13"]),
    r"\{x\left|\right.-3 \leqslant x \leqslant 5\}": (["[-3,5]"], ["(-3,5)"]),
    "x|x > 1": ([r"(1,\infty)", r"\{x \mid x > 1\}"], [r"[1,\infty)", "1"]),
    "= 2x": (["2x"], ["2"]),
    # Relations, and what is said of a parameter
    "Q⊆P": ([r"Q \subseteq P", r"P \supseteq Q"], [r"P \subseteq Q", r"Q \subset P", "PQ"]),
    ">": (["\\boxed{>}"[7:-1]], ["<", "=", "1"]),
    r"n \equiv 1 \pmod{6}": ([r"n \equiv 7 \pmod 6", r"1 \pmod{6}"], ["n = 1", "1", r"n \equiv 1 \pmod{7}"]),
    r"A \cap B = \{1, 2\}": ([r"\{2,1\}"], [r"\{1\}", "1"]),
    r"f(x)_{\text{max}} = 5": (["5"], ["-5"]),
    "P(X=3) = 0.25": ([r"\frac14"], ["3"]),
    r"a_n = n \quad \forall n": (["a_n = n", "n"], ["a_n = 2n"]),
    r"(k\pi, k\pi + 1) (k \in \mathbb{Z})": ([r"(k\pi, k\pi + 1)"], [r"(k\pi, k\pi + 2)"]),
    r"\begin{cases} 1, & n = 1 \\ 2n, & n > 1 \end{cases}": (
        [r"\begin{cases} 2n & n>1 \\ 1 & \text{if } n=1 \end{cases}"],
        [r"\begin{cases} 2n, & n = 1 \\ 1, & n > 1 \end{cases}", "2n", "1"],
    ),
    r"\begin{cases} x = 6, \\ y = 5. \end{cases}": (["(6,5)", "x=6, y=5"], ["(5,6)", "6"]),
    r"2^{4030}": ([r"4^{2015}"], ["2^{4029}", "2", "4030"]),
    "\u2460\u2462": (["1, 3", "\u2460, \u2462", r"\{3, 1\}"], ["1", "13", "\u2460\u2461"]),
    # Words
    "False": (["No", "no", r"\text{false}"], ["True", "Yes", "0"]),
    "Yes": (["True", r"\text{Yes}"], ["False", "No", "1"]),
    "The first player wins.": (["first player wins", r"\text{The first player wins}"], ["second player wins", "1"]),
    "It is impossible": (["impossible", r"\text{Not possible}"], ["possible", "0"]),
}  # fmt: skip


def value(answer, gold):
    return Math().score(Row(None, rf"So it is \boxed{{{answer}}}.", None, {"answer": gold})).value


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_is_paid_in_other_spellings_and_to_no_other_value(gold):
    right, wrong = GOLDS[gold]
    assert {answer: value(answer, gold) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: value(answer, gold) for answer in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize("gold", [gold for gold in GOLDS if "}}" not in gold and "]}" not in gold])
def test_a_golds_own_text_is_right(gold):
    assert value(gold, gold) == 1.0


@pytest.mark.parametrize(
    "gold",
    [
        "The vectors a_1 and a_2 are collinear.",
        "All of the people whom they asked have seen the film that was shown on that evening in town",
        r"\triangle ABC \text{ is an equilateral triangle}",
        r"(1, a_1+\ldots+a_n)",
        r"3, 5, 7, \ldots",
    ],
)
def test_a_number_is_no_statement_and_no_list(gold):
    assert [value(answer, gold) for answer in ("8", r"\frac{1}{2}", gold)] == [0.0, 0.0, 1.0]
    assert value(r"\text{so say all of us, more or less}", gold) is None


def test_a_statement_that_tells_a_number_is_left_open():
    for gold in (
        "the ratio of them is 3:2",
        "there are two of them in it",
        r"the sum is \frac{1}{2} or so, and is it",
    ):
        assert {value(answer, gold) for answer in ("3", "2", r"\frac{1}{2}")} == {None}
    assert [value(answer, "the least of them is 3 or more") for answer in ("3", "2")] == [None, 0.0]


def test_no_in_plain_text_answers_a_false_gold():
    for text in ("The answer is No.", "Answer: No", r"\boxed{\text{No}}", "no"):
        assert Math().score(Row(None, text, None, {"answer": "False"})).value == 1.0, text

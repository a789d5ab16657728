"""Hostile answers and texts: judged at once, in this process and without an alarm."""

import signal

import pytest

from tests.processor_time import timed
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.rules.maths import Math

LIMIT_S = 0.5  # of processor time

CELLS = r"\\".join("&".join(f"a_{i}{j}" for j in range(9)) for i in range(9))
BLOW_UPS = {
    "tower": "9^9^9^9", "braced tower": "9^{9^9}", "tower of tens": "10^{10^{10}}", "tower of e": "e^{e^{e^{e^{10}}}}",
    "imaginary tower": "i^i^i^i", "long tower": "2^" * 250 + "2", "small base": "2^{0.1^{-9999}}",
    "factorial": "1000000000!", "nested factorial": "((9!)!)!", "many factorials": "x!" * 250,
    "power and one": "2^{10^9}+1", "binomial": r"\binom{1000000000}{500000000}", "polynomial": "(x+1)^{1000000}",
    "multinomial": "(x+y+z+w)^{500}", "product of powers": "(x+1)^{50}(y+1)^{50}(z+1)^{50}",
    "sum": r"\sum_{i=1}^{10^9}\sin(i^2)", "sum to a number": r"\sum_{i=1}^{1000000000} \sin(i^2)",
    "infinite sum": r"\sum_{i=1}^{\infty} \frac{1}{i^2}",
    "sums in sums": r"\sum_{i=1}^{100} \sum_{j=1}^{100} \sum_{k=1}^{100} \sin(ijk)",
    "product": r"\prod_{i=1}^{100000000} i",
    "integral": r"\int_0^{\infty} \frac{\sin(x^2)\ln(1+e^{-x})}{x^3+\sqrt{x}}\,dx",
    "limit": r"\lim_{x \to 0} \frac{\sin x}{x}", "determinant": rf"\begin{{vmatrix}}{CELLS}\end{{vmatrix}}",
    "large matrix": r"\operatorname{eye}(1000000000)", "large matrix, bare": "zeros(100000,100000)",
    "eigenvalues": r"\operatorname{eigenvals}(\begin{pmatrix}a&b\\c&d\end{pmatrix})",
    "parentheses": "(" * 900 + "3" + ")" * 900, "fractions": r"\frac{" * 300, "roots": r"\sqrt" * 390,
    "functions": r"\sin" * 300 + "x", "signs": "-" * 501 + "3", "bars": "|" * 500, "many digits": "0." + "3" * 1900,
    "logarithms": "+".join(rf"\ln({number}x)" for number in range(70)),
    "logarithms to many digits": "9" * 900 + r"+\ln x" * 150, "factorial to many digits": "x!+10^{900}",
    "small number below a tower": "e^{e^{e^{1/(0.00001x)}}}", "nested functions": r"\sin(1-" * 60 + "x" + ")" * 60,
    "nested logarithms": r"\ln(2+" * 60 + "x" + ")" * 60, "continued fraction": r"1+\frac{1}{" * 60 + "x" + "}" * 60,
    "nested exponentials": r"\exp(" * 60 + "x" + ")" * 60, "nested binomials": r"\binom{x}{" * 30 + "x" + "}" * 30,
    "nested sets": r"\{" * 60 + "1,2" + r"\}" * 60, "nested bars": "(|1+" * 60 + "x" + "|)" * 60,
    "nested assignments": "(x=(" * 30 + "1" + "))" * 30, "factorial of a fraction": r"(\frac{10^{9}}{7})!",
    "gcd": r"\gcd(10^{900},3)", "floor": r"\lfloor 10^{300}\pi \rfloor",
    "radicals": "+".join(rf"\sqrt{{{prime}}}" for prime in (2, 3, 5, 7, 11, 13, 17)),
    "trigonometry": r"\sin^8x\cos^8x\tan^8x+\sin^7(2x)\cos^7(3x)", "list": "1," * 250 + "1",
    "sets in a set": r"\{" + ",".join(rf"\{{{i},{i + 1}\}}" for i in range(30)) + r"\}", "surrogates": "\ud800\udfff",
    "NUL": "\x00",
}  # fmt: skip


def judged_within(rule: Math, text: str, gold: str) -> tuple[float | None, str]:
    verdict, seconds = timed(lambda: rule.score(Row("Compute x.", text, None, {"answer": gold})))
    assert seconds < LIMIT_S
    return verdict.value, verdict.status


@pytest.fixture(scope="module")
def rule():
    rule = Math()
    rule.score(Row(None, r"\boxed{2x}", None, {"answer": "y+1"}))  # The first call imports mpmath.
    return rule


# The gate looks at the answer: a number and an expression as golds for all, every form of gold for answers with forms.
GOLDS = ("3", r"3\sqrt{13}", "x^2+1", r"\{1,2\}", "y=2x+3")
CASES = [(name, gold) for name in BLOW_UPS for gold in ("3", "x^2+1")]
CASES += [(name, gold) for name in ("nested sets", "nested assignments") for gold in GOLDS[1:]]


@pytest.mark.parametrize(("name", "gold"), CASES)
def test_an_answer_that_would_blow_up_earns_nothing_at_once(rule, name, gold):
    value, status = judged_within(rule, f"So $\\boxed{{{BLOW_UPS[name]}}}$.", gold)
    assert value == 0.0
    assert status in ("ok", "no_answer", "too_complex", "too_long")


def test_what_would_blow_up_is_called_too_complex_and_is_right_as_the_golds_own_text():
    for name in ("tower", "nested factorial", "binomial", "sum", "product", "integral", "determinant"):
        verdict = Math().score(Row(None, f"\\boxed{{{BLOW_UPS[name]}}}", None, {"answer": "3"}))
        assert verdict.status == "too_complex", name
    assert Math().score(Row(None, r"\boxed{9^{9^9}}", None, {"answer": "9^{9^9}"})).value == 1.0
    assert Math().score(Row(None, r"\boxed{3}", None, {"answer": "9^{9^9}"})).status == "undecided"


TEXTS = {
    "dollar not closed": "$" + "1 " * 20_000, "dollars": "x $" * 3_000 + "1 " * 20_000,
    "braces not closed": "\\boxed{" + "{" * 100_000, "boxes not closed": "\\boxed{" * 50_000,
    "boxes": "".join(f"\\boxed{{{number}}}" for number in range(20_000)), "answer tags": "<answer>" * 50_000,
    "comments": "<!--" * 50_000, "percent lines": "\n%" * 100_000, "thoughts": "<think></think>" * 20_000,
    "announcements": "answer is " * 20_000, "negations": "not 5 " * 50_000, "hashes": "#" * 200_000,
    "parentheses": "\\(" * 100_000, "letters": "a" * 1_000_000, "digits": "1" * 1_000_000, "spaces": " " * 1_000_000,
    "newlines": "\n" * 1_000_000, "backslashes": "\\" * 500_000,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text_earns_nothing_at_once(rule, name):
    assert judged_within(rule, TEXTS[name], "3")[0] == 0.0


ANSWERS = {
    "signs": r"\pm" * 600, "tuple of signs": "(" + ",".join([r"\pm 1"] * 30) + ")",
    "sets in sets": r"\{x|" * 60 + "x<1" + r"\}" * 60, "relations in tuples": "x=(1," * 60 + "1" + ")" * 60,
    "unequal tuples": r"a \neq (1," * 60 + "1" + ")" * 60, "exponents": "x^(" * 60 + "1" + ")" * 60,
    "exponents left open": "x^(" * 600, "joined words": r"\text{" + "and " * 450 + "}",
    "names in quotients": r"\frac{" * 60 + "A" + "}{B}" * 60, "ratio": ":".join("1" * 900),
    "approximations": r"\approx".join("1" * 200), "inequalities": ",".join(f"x<{number}" for number in range(32)),
    "domains": r"\text{for }x" * 150, "primes": "x" + "'" * 1500,
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_nested_forms_earns_nothing_at_once(rule, name):
    golds = ("5", r"x<1 \text{ or } x>3", r"\frac13 \approx 0.33", "x=1,y=2", r"\pm 1, \pm 2", ANSWERS[name] + "+7")
    for gold in golds:
        assert judged_within(rule, rf"\boxed{{{ANSWERS[name]}}}", gold)[0] in (0.0, None)


def test_a_deep_stack_is_no_exception():
    def score(depth: int) -> str:
        if depth:
            return score(depth - 1)
        return Math().score(Row(None, rf"\boxed{{{BLOW_UPS['continued fraction']}}}", None, {"answer": "3"})).status

    assert {score(depth) for depth in (0, 400, 800)} <= {"ok", "too_complex"}


def test_no_alarm_is_set_and_none_is_cancelled(rule):
    signal.alarm(60)
    try:
        rule.score(Row(None, r"\boxed{\sum_{i=1}^{3} i}", None, {"answer": "6"}))
        assert signal.alarm(0) > 0
    finally:
        signal.alarm(0)

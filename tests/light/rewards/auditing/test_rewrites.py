"""Harmless rewrites: what they look like, and that they differ from the answer in more than its spelling."""

import pytest

from trl_ext.rewards.auditing.rewrites import is_words, respelled, restated
from trl_ext.rewards.mathematics.tokens import tokenize


def texts(answer: str, place: str = "") -> set[str]:
    return {rewrite.text.replace(" ", "") for rewrite in restated(answer) if rewrite.place == place or not place}


@pytest.mark.parametrize(
    ("answer", "place", "other"),
    [
        ("18", "whole", "18.0"),
        ("-3.5", "whole", "-3.50"),
        (r"\frac{3}{4}", "whole", "0.75"),
        (r"-\dfrac23", "whole", "-2/3"),
        ("2/3", "whole", r"\frac{2}{3}"),
        (r"5\text{ cm}^2", "whole", r"5.0\text{cm}^{2}"),
        (r"50\%", "whole", "50.0%"),
        ("x^2 - 5x + 6", "whole", "-5x+6+x^{2}"),
        ("(x-2)(x-3)", "whole", "(x-3)(x-2)"),
        (r"\frac{x+1}{y}", "whole", "(x+1)/(y)"),
        (r"3\sqrt{13}", "whole", r"3\cdot\sqrt{13}"),
        (r"2 \arcsin \sqrt{a}", "whole", r"2\arcsin((a)^{1/2})"),
        (r"\ln 2", "whole", r"(\ln2)"),
        ("5:8", "whole", r"\frac{5}{8}"),
        (r"63^\circ 45'", "whole", r"63\degree45.0'"),
        ("1:2:3", "whole", "1.0:2:3"),
        ("2:1", "whole", "2.0:1"),
        (r"\frac13 \approx 0.33", "whole", "0.33"),
        (r"a_0+\ldots+a_n", "whole", r"\ldots+a_{n}+a_{0}"),
        ("52_8", "whole", "(52)_{8}"),
        ("x >= 5", "whole", r"5\leqx"),
        ("x != 5", "whole", r"5\neqx"),
        (r"-793 < a \leq 10", "interval", "(-793,10]"),
        ("a > 10", "interval", r"(10,\infty)"),
        ("x = 5", "value", "5"),
        ("|AB| = 1", "value", "1"),
        (r"\log_6(216) = 3", "value", "3"),
        (r"\mathrm{r} = 5", "name", "r=5"),
        ("(52)_8", "whole", "52_{8}"),
        (r"\frac{NO}{BO} = 2", "value", "2"),
        ("V_1:V_2=11:21", "value", "11:21"),
        ("AB=4, CD=5", "values", "4,5"),
        (r"\{1\pm\sqrt5,-2\}", "part 1", r"\{1+\sqrt{5},1-\sqrt{5},-2\}"),
        (r"\{1\pm\sqrt5,-2\}", "part 2", r"\{1\pm\sqrt{5},-2.0\}"),
        (r"1 \pm \sqrt{2}", "whole", r"1+\sqrt{2},1-\sqrt{2}"),
        ("(1, 2]", "part 1", "(1.0,2]"),
        (r"(-\infty, 3) \cup (5, \infty)", "part 2, part 1", r"(-\infty,3)\cup(5.0,\infty)"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "part 3", r"\begin{pmatrix}1&2\\3.0&4\end{pmatrix}"),
        (r"(-\infty, \infty)", "part 2", r"(-\infty,+\infty)"),
        ("(C)", "whole", "C"),
        ("C", "whole", "(C)"),
    ],
)
def test_an_answer_is_stated_otherwise(answer, place, other):
    assert other in texts(answer, place)


@pytest.mark.parametrize("answer", ["xy = 6", "y = 2x", "F = ma"])
def test_a_value_is_not_taken_from_an_equation_that_is_the_answer(answer):
    assert not texts(answer, "value")


@pytest.mark.parametrize(
    "answer", ["18", "x+2", r"\frac34", "1, 2", "x_1", "x < 5", r"\text{5 cm}", r"2\pi", "$3$ hours"]
)
def test_no_rewrite_has_the_tokens_of_the_answer(answer):
    found = restated(answer)
    assert found and all(tokenize(rewrite.text) != tokenize(answer) for rewrite in found)


@pytest.mark.parametrize("answer", ["18", "x+2", r"\frac34", "(1, 2]", "12345"])
def test_every_respelling_has_the_tokens_of_the_answer(answer):
    assert all(tokenize(rewrite.text) == tokenize(answer) for rewrite in respelled(answer))


@pytest.mark.parametrize("answer", ["", "  ", "{", r"\frac{1}", "(" * 200, "{" * 3000, ":" * 50, "=", "<", "x=", ",,"])
def test_what_cannot_be_read_or_divided_is_no_error(answer):
    assert isinstance(restated(answer), tuple) and not is_words(answer)


def test_words_can_only_be_met_by_the_same_words():
    assert is_words(r"\text{no solution}") and is_words("diverges") and is_words("circle, line segment")
    assert not is_words("18") and not is_words("(C)") and not is_words("x") and not is_words("circle, 5")
    assert is_words(r"\infty") and not is_words(r"(-\infty, \infty)")
    assert restated("diverges") == ()

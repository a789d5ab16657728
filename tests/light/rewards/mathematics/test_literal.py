"""The form of an answer: what has the right value and leaves work undone, and golds' own forms, which are paid."""

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.mathematics.reading.literal import left_to_compute
from trl_ext.rewards.mathematics.tokens import tokenize
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.text.prompt import FORMS, asked_forms

pytest.importorskip("math_verify")


def value(answer: str, gold: str, prompt: object = None, **fields: str) -> float | None:
    return Math(**fields).score(Row(prompt, f"So \\boxed{{{answer}}}", None, {"answer": gold})).value


UNCOMPUTED = [
    (r"15 \times 23", "345"), ("4+3", "7"), ("(3)+(4)", "7"), ("3+4+0", "7"), ("7+0", "7"), (r"1 \cdot 7", "7"),
    (r"(16-3-4)\cdot 2", "18"), (r"\frac{(16-3-4)\cdot 4}{2}", "18"), (r"\frac{36}{2}", "18"), ("36/2", "18"),
    (r"\frac{18}{1}", "18"), ("18^1", "18"), (r"18 \cdot x^0", "18"), (r"\sqrt{324}", "18"), (r"\sqrt2\sqrt2", "2"),
    ("5^2", "25"), ("5!", "120"), (r"\binom{10}{3}", "120"), (r"\log_2 8", "3"), ("(1+i)^2", "2i"), ("|-3|", "3"),
    (r"\lfloor 3.7 \rfloor", "3"), (r"\sum_{i=1}^{10} i", "55"), (r"\sum_{k=1}^{3} x", "3x"), (r"\gcd(12, 18)", "6"),
    (r"\sum_{j=1}^{100} j", "5050"), (r"\sin(\pi/6)", r"\frac12"), (r"\cos 0", "1"), (r"\ln e", "1"),
    (r"1+\frac12", r"\frac32"), (r"3 \cdot \frac{1}{4}", r"\frac34"), (r"\frac{1.5}{2}", "0.75"),
    (r"\frac{1}{2} \cdot \frac{3}{2}", r"\frac34"), (r"\sqrt{9+4}", r"\sqrt{13}"), (r"\sqrt{2}+\sqrt{2}", r"2\sqrt2"),
    (r"\sqrt{2} \cdot \sqrt{3}", r"\sqrt6"), (r"2 \cdot 3\pi", r"6\pi"), (r"\frac{12\pi}{2}", r"6\pi"),
    ("x^2-5x+6+0", "x^2-5x+6"), ("x^2-3x-2x+6", "x^2-5x+6"), ("x^2-5x+2+4", "x^2-5x+6"), (r"2\cdot 4x", "8x"),
    (r"\frac{5x^2}{x}", "5x"), (r"x \cdot x", "x^2"), ("x = 2 \\cdot 4", "x = 8"), ("x = 2 \\cdot 4", "8"),
    ("(1+1, 3)", "(2, 3)"), ("2+3, 7", "5, 7"), (r"\{4/2, 3\}", r"\{2, 3\}"), ("(0, 2+3)", "(0, 5)"),
    (r"2 \cdot 4 \text{ cm}", r"8 \text{ cm}"), (r"\$3 \cdot 6", "18"), (r"(40+10)\%", r"50\%"),
    (r"\begin{pmatrix} 1+1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}"),
    ("y = 2x + 1 + 2", "y = 2x + 3"),
    (r"2 \cdot 10^5 + 1", "200001"), ("(1+\\sqrt2)(1-\\sqrt2)", "-1"), ("(1+\\sqrt2)^2", "3+2\\sqrt2"), ("i^2", "-1"),
    (r"\sqrt{3+2\sqrt2}-\sqrt2", "1"),
    (r"e^{\ln 345}", "345"), (r"\frac{5!}{4!}", "5"), (r"1^x \cdot x", "x"), (r"(x^2)^3", "x^6"),
    (r"x^2-5x+6+\sin(0)", "x^2-5x+6"), ("x^2-5x+6+y-y", "x^2-5x+6"), (r"\frac{y(x+1)}{y}", "x+1"),
    ("34.5 \\cdot 10", "345"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), UNCOMPUTED)
def test_an_answer_that_leaves_work_undone_is_paid_where_the_gold_does_too_and_not_else(answer, gold):
    assert value(answer, gold) == 0.0
    assert value(answer, gold, form="any") == value(answer, answer) == value(gold, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *(("18.0", "18"), ("1.8e1", "18"), ("18 dollars", "18"), (r"3 \text{ million}", "3000000")),
        *(("3 dozen eggs", "36"), (r"3 \times 10^{8}", "300000000"), ("2^{10}", "1024"), (r"\frac{-3}{4}", "-0.75")),
        *((r"-\frac{6}{8}", "-0.75"), (r"1\frac{1}{2}", r"\frac32"), (r"0.\overline{3}", r"\frac13")),
        *((r"\sqrt{117}", r"3\sqrt{13}"), (r"\frac{1}{\sqrt3}", r"\frac{\sqrt3}{3}")),
        *((r"\frac{3\sqrt2}{2}", r"\frac{3}{\sqrt2}"), (r"\pi/2", r"\frac{\pi}{2}")),
        *((r"\frac12 + \frac{\sqrt5}{2}", r"\frac{1+\sqrt5}{2}"), (r"3(1+\sqrt2)", r"3+3\sqrt2")),
        *((r"\ln 8", r"3\ln 2"), (r"\frac{1}{1024}", "2^{-10}"), ("6-5x+x^2", "x^2-5x+6"), ("(x-3)(x-2)", "x^2-5x+6")),
        *(("x=18", "18"), ("x = 2+16 = 18", "18"), ("18 = 2+16", "18"), ("x = 18 = 2+16", "x=18")),
        *((r"2^3 \cdot 5", r"5 \cdot 2^3"), ("3i+2", "2+3i"), ("7, 5", "5, 7"), ("\\sqrt{17}", "4.123105625617661")),
        *(("e^{-2}", r"\frac{1}{e^2}"), (r"\frac{x}{2}", "0.5x")),
        (r"\frac{\sqrt{3}}{2} - \frac{1}{2}i", r"\frac{\sqrt3-i}{2}"),
    ],
)  # fmt: skip
def test_what_is_written_out_is_paid_in_another_form(answer, gold):
    assert value(answer, gold) == 1.0


FACTOR = "Factor $x^2-5x+6$."
ASKED = [
    (FACTOR, "(x-2)(x-3)", ["(x-3)(x-2)", "(2-x)(3-x)", "(x - 2) \\cdot (x - 3)"],
     ["x^2-5x+6", "x^2-5x+6+0", "6-5x+x^2", "x(x-5)+6", "(x^2-5x+6)(1)", "2(x/2-1)(x-3)",
     "x(x-5+6/x)", "x(x-5+6x^{-1})",
      r"(x^2-5x+6)\frac{y+1}{1+y}"]),
    ("Factor completely: $3x^2-6x$", "3x(x-2)", ["3(x-2)x", "x \\cdot 3(x-2)"], ["x(3x-6)", "3(x^2-2x)", "3x^2-6x"]),
    ("Factorise $x^2+2x+1$", "(x+1)^2", ["(x+1)(x+1)"], ["x^2+2x+1", "1+2x+x^2", "(x+1)^2+0"]),
    ("Find the prime factorization of 360.", r"2^3 \cdot 3^2 \cdot 5", [r"5 \cdot 2^3 \cdot 3^2"],
     ["360", r"36 \cdot 10"]),
    ("Expand $(x+1)^2$.", "x^2+2x+1", ["1+2x+x^2"], ["(x+1)(x+1)", "x(x+2)+1", "(1+x)^2"]),
    ("Simplify $\\sqrt{50}$.", r"5\sqrt2", [r"\sqrt2 \cdot 5"],
     [r"\sqrt{50}", r"\frac{10\sqrt2}{2}", r"\sqrt{25\cdot2}"]),
    (r"Rationalize the denominator of $\frac{6}{\sqrt3}$.", r"2\sqrt3", [r"\sqrt3 \cdot 2"],
     [r"\frac{6}{\sqrt3}", r"6/3^{1/2}"]),
    (r"Simplify $\frac{x^2-1}{x-1}$", "x+1", ["1+x"], [r"\frac{(x+1)^2}{x+1}", r"\frac{x^2+x}{x}"]),
    ("Simplify $10-4(n-5)-20$.", "10-4n", ["-4n+10"], ["10-4(n-5)-20", "-4(n-5)-10", "10-4n+0"]),
    ("What is $6/8$ in simplest form?", r"\frac34", ["3/4"], [r"\frac68", r"\frac{12}{16}"]),
    ("Express $0.75$ as a common fraction.", r"\frac34", ["3/4"], ["0.75", ".75"]),
    (r"Write $\frac14$ as a decimal.", "0.25", [".25", "0.250"], [r"\frac14", r"\frac{2}{8}", "1/4"]),
    (r"Write $\frac32$ as a mixed number.", r"1\frac12", ["1 1/2"], [r"\frac32", "1.5"]),
    ("Write 25000 in scientific notation.", r"2.5 \times 10^4", [r"2.50 \cdot 10^{4}"], ["25000", "25,000"]),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "gold", "right", "wrong"), ASKED)
def test_the_form_that_the_task_asks_for_must_fit(prompt, gold, right, wrong):
    assert {answer: value(answer, gold, prompt) for answer in (gold, *right)} == dict.fromkeys((gold, *right), 1.0)
    assert {answer: value(answer, gold, prompt) for answer in wrong} == dict.fromkeys(wrong, 0.0)
    chat = [{"role": "user", "content": prompt}]
    assert value(wrong[0], gold, chat) == 0.0 and value(wrong[0], gold, chat, form="any") in (0.0, 1.0)


def test_a_form_that_the_gold_has_not_is_not_asked_for(subtests):
    for prompt, gold, answer in (
        ("Factor the brackets out, and give the sum.", "x^2-1", "-1 + x^2"),
        ("What is the greatest common factor of 12 and 18?", "6", "6.0"),
        ("Expand nothing: what is half of 5?", "2.5", r"\frac52"),
        ("Factor out of the room: is it a prime factor? It is $x$.", "2x", "x \\cdot 2"),
    ):
        with subtests.test(prompt=prompt, gold=gold):
            assert value(answer, gold, prompt) == 1.0


def test_a_prompt_asks_for_a_form_by_a_verb_or_by_its_name(subtests):
    for prompt, forms in (
        *(("Factor $x^2-1$ completely.", {"factored"}), ("First find it, then factor.", {"factored"})),
        ("The largest prime factor of 12 is? By what factor does it grow?", set()),
        ("If the population expands, how large is it?", set()),
        ([{"role": "user", "content": "Expand it"}, {"role": "user", "content": "Go on."}], set()),
        *(("Express your answer as a common fraction in lowest terms.", {"a fraction", "simplified"}), (None, set())),
    ):
        with subtests.test(prompt=prompt):
            assert asked_forms(prompt) == forms


def test_every_form_can_be_asked_for():
    asked = "Factor it. Expand it. Simplify it. Rationalize it, as a fraction, as a decimal, as a mixed number, in "
    assert asked_forms(asked + "scientific notation") == FORMS.keys()
    assert all(asked_forms(one) for one in (*asked.split(".")[:3], "Multiply out", "in lowest terms", "reduced form"))


def test_what_is_left_to_compute_is_named_and_the_eval_profile_does_not_ask_for_it():
    assert left_to_compute(tokenize(r"15 \times 23")) == "a product of numbers"
    verdict = Math().score(Row(None, r"\boxed{3+4}", None, {"answer": "7"}))
    assert verdict.detail.endswith("left to compute: a sum of numbers")
    assert value(r"15 \times 23", "345", profile="eval") == 1.0


@pytest.mark.parametrize("answer", [r"\frac{n}{0/\pi}", r"x<\frac{1}{(y)(0)}", r"\frac{5x}{0 \cdot x}"])
def test_a_division_by_nothing_is_no_error(answer):
    assert value(answer, "5", "Simplify it") == 0.0
    assert value("5", answer, "Factor it") in (0.0, None)
    assert left_to_compute(tokenize(answer.partition("<")[2] or answer)) == "a quotient of numbers"

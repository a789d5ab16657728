"""Golds against answers of every kind, drawn at random: a completion is marked, and never ends a run."""

import random

import pytest

from trl_ext import RuleSet

RULES = RuleSet.from_dict({"rules": [{"rule": "math", "gold": "answer"}]})
WRITTEN = (
    *("6", "x=1", "x=1, y=5", r"x=1, y=5 \text{ or } x=5, y=1", "(1,5),(5,1)", r"\{1,2\}", "[1,2)", "x>3", "1<x<2"),
    *(r"(-\infty,3]\cup[4,5)", r"\begin{pmatrix}1\\2\end{pmatrix}", r"x\in(1,2)", "()", "=", "=x", r"\frac{}{}"),
    *(
        r"\sqrt{}",
        r"\text{ or }",
        r"1 \text{ or } 2",
        "f(x)=x^2",
        r"\pm 3",
        "(x,y)=(1,2)",
        "(A)",
        r"\text{yes}",
        "12:30",
    ),
    *(
        r"50\%",
        "$5",
        r"5\text{ cm}",
        "1,234",
        r"\emptyset",
        r"2\pi r",
        "a,b,c",
        "((1,2),3)",
        r"\{(1,2),(3,4)\}",
        "1/0",
    ),
    *(
        "x=1,x=2,y=3",
        "x=1; y=2",
        r"(1,2)\cup",
        "[,]",
        "(,)",
        r"\{,\}",
        "||",
        r"\{x|x>1\}",
        r"2^{3^{4^{5}}}",
        "9" * 400,
    ),
)
BOXES = (r"\boxed{{{}}}", "The answer is {}.", "#### {}", "<answer>{}</answer>", "{}")


def worn(text, rng):
    """The text with up to three signs more, less or elsewhere."""
    signs = list(text)
    for _ in range(rng.randint(0, 3)):
        place = rng.randrange(len(signs) + 1)
        signs[place : place + rng.randint(0, 1)] = rng.choice(["", *r"{}()[],=\ x1<>|&+-/^_"])
    return "".join(signs)


def test_named_values_against_one_number_are_no_points():
    completion = r"\boxed{x=1, y=5 \text{ or } x=5, y=1}"
    assert RULES(prompts=["q"] * 2, completions=[completion] * 2, answer=["6", "(1,5),(5,1)"]) == [0.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_no_pair_of_gold_and_answer_ends_a_run(seed):
    rng = random.Random(seed)
    golds = [worn(rng.choice(WRITTEN), rng) or "6" for _ in range(1000)]
    golds = [gold if gold.strip() else "6" for gold in golds]
    completions = [rng.choice(BOXES).format(worn(rng.choice(WRITTEN), rng)) for _ in golds]
    values = RULES(prompts=["q"] * len(golds), completions=completions, answer=golds)
    assert len(values) == 1000 and set(values) <= {0.0, 1.0, None}

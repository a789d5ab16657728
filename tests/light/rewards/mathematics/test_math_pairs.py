"""25,000 pairs of golds and answers, drawn at random: each is marked, and none raises an error."""

import json
import random

import pytest

from tests.verdicts import read_lines
from trl_ext import RuleSet
from trl_ext.rewards import Math, Row

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


def mark(golds, answers, rng, count):
    """Mark pairs of a gold and an answer, some of them worn; any exception is the test's."""
    rule = Math()
    values = []
    for _ in range(count):
        gold, answer = (worn(text, rng) if rng.random() < 0.5 else text for text in map(rng.choice, (golds, answers)))
        row = Row(None, rng.choice(BOXES).format(answer), None, {"answer": gold or "6"})
        values.append(rule.score(row).value)
    assert set(values) == {0.0, 1.0, None}


@pytest.mark.parametrize("seed", range(8))
def test_no_pair_of_made_golds_and_answers_raises_an_error(seed):
    made = [*WRITTEN]
    for line in read_lines():
        if line["why"].startswith("A gold is paid in other spellings"):
            made += [line["text"].removeprefix(r"So it is \boxed{").removesuffix("}.")]
            made += [*line.get("paid", ()), *line.get("unpaid", ())]
    mark(made, made, random.Random(seed), 2500)


def test_no_pair_of_real_golds_raises_an_error(data_dir):
    rows = [json.loads(line) for line in (data_dir / "math500_first250.jsonl").open(encoding="utf-8")]
    real = [row["answer"] for row in rows]
    with (data_dir / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        real += [json.loads(line)["answer"].rpartition("#### ")[2] for line, _ in zip(lines, range(250), strict=False)]
    mark(real, [*real, *WRITTEN], random.Random(0), 5000)

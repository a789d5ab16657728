"""The forms that prompts ask for, and the names of what an answer leaves to compute."""

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.mathematics.literal import left_to_compute
from trl_ext.rewards.mathematics.tokens import tokenize
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.text.task import FORMS, asked_forms


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


def test_what_is_left_to_compute_is_named():
    assert left_to_compute(tokenize(r"15 \times 23")) == "a product of numbers"
    verdict = Math().score(Row(None, r"\boxed{3+4}", None, {"answer": "7"}))
    assert verdict.detail.endswith("left to compute: a sum of numbers")

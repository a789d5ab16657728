"""Cosine: the length part of the cosine-scaled reward, and how it becomes the whole of it."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, RuleSet
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.cosine import Cosine


def value_of(rule: Cosine, num_tokens: int) -> float | None:
    return rule.score(Row(None, "A: 18", (0,) * num_tokens, {})).value


@pytest.mark.parametrize(("num_tokens", "value"), [(0, 1.0), (50, 0.75), (100, 0.5), (101, 0.5), (200, 0.5)])
def test_the_value_falls_along_half_a_cosine_and_stays_there(num_tokens, value):
    assert value_of(Cosine(max_len=100), num_tokens) == pytest.approx(value)


def test_the_value_can_rise_with_the_length():
    rule = Cosine(max_len=100, short=-1.0, long=-0.5)
    assert [value_of(rule, n) for n in (0, 100)] == [-1.0, -0.5]
    assert (rule.floor, rule.ceiling) == (-1.0, -0.5)


def test_a_blank_completion_earns_the_lower_end():
    verdict = Cosine(max_len=100).score(Row(None, " \n", (0,), {}))
    assert (verdict.value, verdict.status) == (0.5, "no_answer")


@pytest.mark.parametrize("num_tokens", [1, 30, 64, 99, 100, 250])
@pytest.mark.parametrize("answer", ["18", "17"])
def test_two_rules_behind_a_grader_are_trls_cosine_scaled_reward(num_tokens, answer):
    pytest.importorskip("math_verify")
    from trl.rewards import get_cosine_scaled_reward

    ids = [[0] * num_tokens]
    text = rf"So it is \boxed{{{answer}}}."
    theirs = get_cosine_scaled_reward(max_len=100)([[{"role": "assistant", "content": text}]], [r"\boxed{18}"], ids)
    ours = RuleSet(
        [
            Answer(weight=0),
            Cosine(max_len=100, short=-1.0, long=-0.5),
            Cosine(max_len=100, short=2.0, long=1.0, gate="answer", name="cosine_right"),
        ]
    )
    assert ours(completions=[text], completion_ids=ids, answer=["18"]) == pytest.approx(theirs)


@pytest.mark.parametrize(
    "fields",
    [{"max_len": 0}, {"max_len": 1.5}, {"max_len": 9, "short": float("nan")}, {"max_len": 9, "unit": "bytes"}],
)
def test_fields_that_cannot_work_are_refused(fields):
    with pytest.raises(RuleError, match="cosine"):
        Cosine(**fields)

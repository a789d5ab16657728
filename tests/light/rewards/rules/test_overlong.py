"""SoftOverlong: DAPO's equation 13, counted by TRL."""

import pickle

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.overlong import SoftOverlong


def value_of(rule: SoftOverlong, num_tokens: int) -> float | None:
    return rule.score(Row(None, "", (0,) * num_tokens, {})).value


@pytest.mark.parametrize(("num_tokens", "value"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_the_punishment_is_equation_13(num_tokens, value):
    assert value_of(SoftOverlong(100, 20), num_tokens) == value


def test_without_a_cache_it_is_a_hard_limit():
    assert [value_of(SoftOverlong(100, 0), n) for n in (100, 101)] == [0.0, -1.0]


def test_it_needs_completion_ids():
    with pytest.raises(RuleError, match="no completion_ids"):
        SoftOverlong(100, 20).score(Row(None, "a", None, {}))


def test_it_pickles_after_use():
    rule = SoftOverlong(100, 20)
    value_of(rule, 90)
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize("fields", [(0, 0), (100, 101), (100, -1), (100.0, 20), ("100", 20)])
def test_fields_that_cannot_work_are_refused(fields):
    with pytest.raises(RuleError, match="soft_overlong"):
        SoftOverlong(*fields)

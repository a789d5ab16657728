"""Length: tokens, characters or words within bounds."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.length import Length


def value_of(rule: Length, text: str, completion_ids: tuple[int, ...] | None = None) -> float | None:
    return rule.score(Row(None, text, completion_ids, {})).value


@pytest.mark.parametrize(("num_tokens", "value"), [(1, 0.5), (2, 1.0), (4, 1.0), (5, 0.5), (6, 0.0), (60, 0.0)])
def test_length_falls_linearly_on_both_sides(num_tokens, value):
    assert value_of(Length(low=2, high=4, slack=2), "", tuple(range(num_tokens))) == value


def test_length_without_slack_is_a_hard_limit():
    assert value_of(Length(high=1), "", (1, 2)) == 0.0


def test_length_counts_characters_and_words():
    assert value_of(Length(low=5, high=5, unit="chars"), "a b c") == 1.0
    assert value_of(Length(low=3, high=3, unit="words"), "a b c") == 1.0
    assert value_of(Length(low=4, high=4, unit="words"), "做数学 now") == 1.0


def test_length_in_tokens_needs_completion_ids():
    with pytest.raises(RuleError, match="no completion_ids"):
        value_of(Length(), "a b c")


@pytest.mark.parametrize("fields", [{"low": 5, "high": 2}, {"slack": -1}, {"high": "24"}, {"unit": "bytes"}])
def test_length_refuses_bounds_that_cannot_work(fields):
    with pytest.raises(RuleError, match="length"):
        Length(**fields)

"""Pattern: a regular expression on the whole text or on a part, under a time limit."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.pattern import Pattern


def judged(rule: Pattern, text: str):
    return rule.score(Row(None, text, None, {}))


def test_full_matches_the_whole_stripped_text():
    rule = Pattern(r"-?\d+")
    assert [judged(rule, text).value for text in (" -18\n", "-18 eggs")] == [1.0, 0.0]


def test_search_matches_any_part():
    rule = Pattern(r"^A: \d+$", mode="search")
    assert [judged(rule, text).value for text in ("A: 18", "so A: 18", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["full", "search"])
def test_a_pattern_that_explodes_is_given_up(mode):
    verdict = judged(Pattern(r"(a|aa)+$", mode=mode, timeout_s=0.01), "a" * 60 + "!")
    assert (verdict.value, verdict.status) == (0.0, "timeout")


def test_a_text_beyond_the_limit_is_not_matched():
    verdict = judged(Pattern(r"a+"), "a" * 250_001)
    assert (verdict.value, verdict.status) == (0.0, "too_long")


def test_fields_that_cannot_work_are_refused(subtests):
    for fields, message in (
        *(({"pattern": "(a"}, "does not compile"), ({"pattern": ""}, "Give a regular expression")),
        *(({"pattern": None}, "Give a regular expression"), ({"pattern": "a", "timeout_s": 0}, "timeout_s is 0")),
        ({"pattern": "a", "mode": "match"}, "'full', 'search'"),
    ):
        with subtests.test(fields=fields), pytest.raises(RuleError, match=message):
            Pattern(**fields)

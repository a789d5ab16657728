"""Keywords: whole words in any script, with counts."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.config import build_rules, describe_rule
from trl_ext.rewards.rules.keywords import Keywords


def value_of(rule: Keywords, text: str) -> float | None:
    return rule.score(Row(None, text, None, {})).value


def test_keywords_are_whole_words_in_any_case(subtests):
    for value, texts in {
        1.0: ("A Cat and a dog.", "cat dog " * 50),
        0.5: ("my cat.",),
        0.0: ("the cathedral dogma", "cat and dog and IDK", ""),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert value_of(Keywords(required=("cat", "dog"), forbidden=("idk",)), text) == value


def test_a_word_ends_where_its_script_says(subtests):
    for word, text, found in (
        *(("数学", "我喜欢数学题", True), ("GPT", "我用GPT做题", True), ("рот", "поворот", False)),
        ("कम", "कमी", False),  # The vowel sign behind it is a combining mark, not a letter.
        *(("рот", "«рот»", True), ("कम", "कम है", True), ("cafe", "cafe\u0301", False)),
        *(("C++", "use C++, not C", True), ("C", "use C++", True)),
        *(("in conclusion", "so, in\n  conclusion: 4", True), ("straße", "STRASSE", True)),
    ):
        with subtests.test(word, text=text):
            assert value_of(Keywords(required=[word]), text) == float(found)


@pytest.mark.parametrize("hidden", ["i\u200bdk", "ｉｄｋ", "i\u00addk", "\U0001d422\U0001d41d\U0001d424", "IDK"])
def test_a_forbidden_word_does_not_hide_behind_looks(hidden):
    assert value_of(Keywords(forbidden=["idk"]), f"well, {hidden}.") == 0.0


@pytest.mark.parametrize(("times", "value"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 1.0), (4, 0.0)])
def test_counts_say_at_least_and_at_most(times, value):
    rule = Keywords(required=["so", ["therefore", 2]], forbidden={"therefore": 3})
    assert value_of(rule, "so " + "therefore " * times) == value


def test_options_of_keywords():
    rule = Keywords(required=("cat", "dog"), partial=False)
    assert [value_of(rule, text) for text in ("cat", "cat dog")] == [0.0, 1.0]
    assert value_of(Keywords(forbidden=("idk",)), "It is 4.") == 1.0
    assert value_of(Keywords(required=("Cat",), ignore_case=False), "cat") == 0.0
    assert value_of(Keywords(required=("cat",), whole_word=False), "cathedral") == 1.0


@pytest.mark.parametrize(
    ("text", "status"), [("", "no_answer"), (" \n\u3000", "no_answer"), ("a" * 250_001, "too_long")]
)
def test_saying_nothing_does_not_earn_the_absence_of_forbidden_words(text, status):
    verdict = Keywords(forbidden=("idk",)).score(Row(None, text, None, {}))
    assert (verdict.value, verdict.status) == (0.0, status)


@pytest.mark.parametrize("hidden", ["_cannot_", "**cannot**", "can**not**", "__cannot__ do", "`cannot`", "~~cannot~~"])
def test_emphasis_hides_no_word(hidden):
    assert value_of(Keywords(forbidden=("cannot",)), f"We {hidden} go") == 0.0
    assert value_of(Keywords(required=("cannot",)), f"We {hidden} go") == 1.0


def test_a_keyword_of_marks_is_found_as_it_is_written():
    assert value_of(Keywords(forbidden=("**",), whole_word=False), "a **b**") == 0.0
    assert value_of(Keywords(required=("snake_case",)), "in snake_case") == 1.0
    assert value_of(Keywords(required=("snake",)), "in snake_case") == 0.0


@pytest.mark.parametrize("required", [["so", ["therefore", 2]], {"so": 1, "therefore": 2}, ("so", ("therefore", 2))])
def test_lists_mappings_and_pairs_say_the_same_and_survive_yaml(required):
    rule = Keywords(required=required, forbidden={"idk": 0, "very": 3})
    assert describe_rule(rule)["required"] == ["so", ["therefore", 2]]
    assert build_rules({"rules": [describe_rule(rule)]})["rules"] == [rule]

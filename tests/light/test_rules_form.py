"""The rules about form: tags, patterns, length, keywords, repetition, and functions as rules."""

import pickle

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Call, Format, Keywords, Length, Repetition, Row, Rule, RuleSet, Tags, Verdict


def value_of(rule: Rule, text: str, completion_ids: tuple[int, ...] | None = None) -> float | None:
    return rule.score(Row(None, text, completion_ids, {})).value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>2+2</think> so <answer>4</answer>", 1.0),
        ("<think>2+2</think> 4", 0.5),
        ("<think> </think><answer>4</answer>", 0.5),
        ("<answer>4</answer><think>2+2</think>", 0.5),
        ("<think><answer>4</answer></think>", 0.5),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.5),
        ("<think>2+2</think><answer>4", 0.5),
        ("</think>a<think></answer>4<answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_give_the_share_of_pairs_that_are_right(text, value):
    assert value_of(Tags("think", "answer"), text) == value


def test_tags_name_the_pairs_that_fail():
    verdict = Tags("think", "answer").score(Row(None, "<think>a</think>", None, {}))
    assert verdict.detail == "not once, closed, filled and in order: answer"


@pytest.mark.parametrize("names", [(), ("think", "think"), ("<think>",), ("a b",), ("",)])
def test_tags_refuse_names_that_cannot_work(names):
    with pytest.raises(RuleError, match="tags"):
        Tags(*names)


def test_format_matches_the_whole_stripped_text():
    rule = Format(r"-?\d+")
    assert (value_of(rule, " -18\n"), value_of(rule, "-18 eggs")) == (1.0, 0.0)


def test_format_gives_up_on_a_pattern_that_explodes():
    verdict = Format(r"(a|aa)+", timeout_s=0.01).score(Row(None, "a" * 60 + "!", None, {}))
    assert (verdict.value, verdict.status) == (0.0, "timeout")


@pytest.mark.parametrize("fields", [{"pattern": "(a"}, {"pattern": ""}, {"pattern": "a", "timeout_s": 0}])
def test_format_refuses_what_cannot_work(fields):
    with pytest.raises(RuleError, match="format"):
        Format(**fields)


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A Cat and a dog.", 1.0),
        ("my cat.", 0.5),
        ("the cathedral dogma", 0.0),
        ("cat and dog and IDK", 0.0),
        ("", 0.0),
    ],
)
def test_keywords_are_whole_words_in_any_case(text, value):
    assert value_of(Keywords(required=("cat", "dog"), forbidden=("idk",)), text) == value


def test_chinese_keywords_need_no_word_boundary():
    rule = Keywords(required=("数学", "GPT"), forbidden=("不知道",))
    assert value_of(rule, "我用GPT做数学题") == 1.0
    assert value_of(rule, "数学GPT我不知道") == 0.0


def test_only_forbidden_keywords_give_one_when_absent():
    assert value_of(Keywords(forbidden=("idk",)), "It is 4.") == 1.0


def test_keywords_can_mind_case_and_match_inside_words():
    assert value_of(Keywords(required=("Cat",), ignore_case=False), "cat") == 0.0
    assert value_of(Keywords(required=("cat",), whole_word=False), "cathedral") == 1.0


@pytest.mark.parametrize(
    "fields", [{}, {"required": "cat"}, {"required": (" ",)}, {"required": ("Cat",), "forbidden": ("cat",)}]
)
def test_keywords_refuse_lists_that_cannot_work(fields):
    with pytest.raises(RuleError, match="keywords"):
        Keywords(**fields)


def test_repetition_is_counted_on_token_ids():
    assert value_of(Repetition(ngram=2), "all different words here", (1, 2, 1, 2, 1)) == 0.5


def test_repetition_falls_back_to_words():
    assert value_of(Repetition(ngram=1), "no no no yes") == 0.5
    assert value_of(Repetition(ngram=2), "好的好的好") == 0.5


def test_a_short_text_repeats_nothing_and_an_empty_one_earns_nothing():
    assert value_of(Repetition(), "one two") == 1.0
    assert value_of(Repetition(), "") == 0.0


def test_repetition_refuses_ngrams_of_nothing():
    with pytest.raises(RuleError, match="ngram is 0"):
        Repetition(ngram=0)


def shouts(row: Row) -> float:
    return float(row.text.isupper())


def test_a_function_becomes_a_rule_named_after_it():
    rules = RuleSet([Call(shouts, weight=0.5)])
    assert rules.rules[0].name == "shouts"
    assert pickle.loads(pickle.dumps(rules))(completions=["HEY", "hey"]) == [0.5, 0.0]


def test_a_lambda_does_not_become_a_rule():
    with pytest.raises(RuleError, match="does not pickle"):
        Call(lambda row: 1.0)


class SoftHTMLLimit(Rule):
    def score(self, row: Row) -> Verdict:
        return Verdict(1.0)


def test_a_rule_is_named_after_its_class():
    assert SoftHTMLLimit().name == "soft_html_limit"


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "1e-3", None, True])
def test_a_weight_is_a_finite_number(weight):
    with pytest.raises(RuleError, match="weight is"):
        SoftHTMLLimit(weight=weight)


@pytest.mark.parametrize("name", ["a/b", "a b", 3])
def test_a_name_fits_into_a_metric_key(name):
    with pytest.raises(RuleError, match="is named"):
        SoftHTMLLimit(name=name)

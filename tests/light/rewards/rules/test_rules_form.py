"""Tags, functions as rules, and what every rule has: a name and a weight."""

import pickle

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Call, Row, Rule, RuleSet, Tags, Verdict


def value_of(rule: Rule, text: str, completion_ids: tuple[int, ...] | None = None) -> float | None:
    return rule.score(Row(None, text, completion_ids, {})).value


def test_tags_give_the_share_of_pairs_that_are_right(subtests):
    for value, texts in {
        1.0: ("<think>2+2</think> so <answer>4</answer>",),
        0.5: (
            *("<think>2+2</think> 4", "<think> </think><answer>4</answer>", "<think>\u200b</think><answer>4</answer>"),
            *("<answer>4</answer><think>2+2</think>", "<think><answer>4</answer></think>"),
            *("<think>a</think><think>b</think><answer>4</answer>", "<think>2+2</think><answer>4"),
        ),
        0.0: ("</think>a<think></answer>4<answer>", ""),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert value_of(Tags("think", "answer"), text) == value


def test_tags_name_the_pairs_that_fail():
    verdict = Tags("think", "answer").score(Row(None, "<think>a</think>", None, {}))
    assert verdict.detail == "not once, closed, filled and in order: answer"


@pytest.mark.parametrize("names", [(), ("think", "think"), ("<think>",), ("a b",), ("",)])
def test_tags_refuse_names_that_cannot_work(names):
    with pytest.raises(RuleError, match="tags"):
        Tags(*names)


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

"""A gate on a status: a rule that counts, and is asked, only where another one ends so."""

import pytest
import yaml

from tests.rules import rule_class
from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import AsyncRule, Length, Math, RuleSet, Verdict
from trl_ext.rewards.config import build_rules

asked: list[str] = []
ON_UNDECIDED = {"rule": "math", "status": "undecided"}
# A gold of more than three words is not compared with another wording.
GOLDS = ["42", "the set of even integers", "42", "the set of even integers"]
ANSWERS = ["\\boxed{42}", "\\boxed{all even numbers}", "\\boxed{41}", "no answer"]


class SecondOpinion(AsyncRule):
    async def score(self, row):
        asked.append(row.text)
        return Verdict(0.75)


def test_a_judge_is_asked_only_where_the_rule_cannot_decide():
    asked.clear()
    metrics: dict[str, float] = {}
    math = Math(gold="gold")
    alone = RuleSet([math])
    parts = [alone.explain("", text, gold=gold).parts[0] for text, gold in zip(ANSWERS, GOLDS, strict=True)]
    undecided = [text for text, part in zip(ANSWERS, parts, strict=True) if part.status == "undecided"]
    assert undecided == ANSWERS[1:2]
    rules = RuleSet([math, SecondOpinion(gate=ON_UNDECIDED)])
    totals = rules(completions=ANSWERS, gold=GOLDS, log_metric=metrics.__setitem__)
    assert totals == [1.0, 0.75, 0.0, 0.0]
    assert asked == undecided
    assert metrics["rules/second_opinion/calls"] == 1
    assert metrics["rules/second_opinion/gated_frac"] == 0.75


def test_a_rule_of_this_process_counts_there_alone():
    rules = RuleSet([Math(gold="gold"), Length(high=100, unit="words", weight=0.5, gate=ON_UNDECIDED)])
    assert rules(completions=ANSWERS, gold=GOLDS) == [1.0, 0.5, 0.0, 0.0]
    part = rules.explain("", ANSWERS[0], gold="42").parts[1]
    assert part.detail.startswith("gate 'math:undecided' is shut")


def test_split_and_yaml_keep_the_gate():
    length = "{rule: length, high: 100, unit: words, gate: {rule: math, status: undecided}}"
    text = f"rules:\n- {{rule: math, gold: gold}}\n- {length}\n"
    rules = RuleSet(**build_rules(yaml.safe_load(text)))
    assert rules.rules[1].gate == "math:undecided"
    columns = rules.split()
    assert columns[1](completions=ANSWERS, gold=GOLDS) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "gate, said",
    [
        ({"rule": "math", "status": "undecidd"}, "waits for the status 'undecidd'"),
        ({"rule": "maths", "status": "undecided"}, "has the gate 'maths'"),
        ({"rule": "math"}, "Write {rule: math, status: undecided}"),
        (["math"], "Give a rule's name"),
    ],
)
def test_a_gate_that_is_wrong_is_told(gate, said):
    with pytest.raises((RuleError, ConfigError), match=said):
        RuleSet([Math(gold="gold"), Length(high=9, gate=gate)])


def test_a_rule_of_ones_own_may_have_its_own_statuses():
    own = rule_class("Own", lambda row: 0.0)
    RuleSet([own(), Length(high=9, gate={"rule": "own", "status": "mine"})])

"""Rules of one's own: numbers in the place of verdicts, a function in YAML, mistakes with their line, examples."""

import sys

import pytest

from tests.rules import rule_class
from trl_ext import rewards as rules
from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import AsyncRule, Call, Math, RuleSet
from trl_ext.rewards.config import describe_rule

MODULE = """
from dataclasses import dataclass
from trl_ext.rewards import Rule

def shouts(row):
    return row.text.isupper()

@dataclass(frozen=True, slots=True, kw_only=True)
class Picky(Rule):
    most: int = 1
    def check(self):
        {}["most"]
    def score(self, row):
        return 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "rules_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("rules_of_mine", None)


@pytest.mark.parametrize("found, value", [(True, 1.0), (False, 0.0), (1, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("tier", ["inline", "worker"])
def test_a_number_or_a_truth_value_is_a_verdict(found, value, tier):
    rule = rule_class("Plain", lambda row: 0.0)
    rule.score = lambda self, row: found
    rule.tier = "inline"
    isolate = tier == "worker"
    assert RuleSet([rule()], isolate=isolate)(completions=["a"]) == [value]


def test_an_async_rule_may_return_a_number():
    class Waits(AsyncRule):
        async def score(self, row):
            return len(row.text)

    assert RuleSet([Waits()])(completions=["abc"]) == [3.0]


@pytest.mark.parametrize("found", [None, "1", [1]])
def test_anything_else_is_an_error(found):
    rule = rule_class("Odd", lambda row: 0.0)
    rule.score = lambda self, row: found
    with pytest.raises(RuleError, match="not a Verdict or a number"):
        RuleSet([rule()], isolate=False)(completions=["a"])


def test_a_function_in_a_yaml_file(module):
    (module / "rules.yaml").write_text("rules:\n- {rule: call, function: rules_of_mine.shouts, weight: 0.5}\n")
    found = RuleSet.from_yaml(module / "rules.yaml")
    assert found(completions=["HELLO", "hello"]) == [0.5, 0.0]
    (rule,) = found.rules
    assert describe_rule(rule) == {
        "rule": "call", "function": "rules_of_mine.shouts", "weight": 0.5, "name": "shouts",
    }  # fmt: skip


@pytest.mark.parametrize("function", ["rules_of_mine.whispers", "no_such_module.f", "shouts"])
def test_a_function_that_is_not_there_is_told_with_its_line(module, function):
    (module / "rules.yaml").write_text(f"rules:\n- rule: call\n  function: {function}\n")
    with pytest.raises(ConfigError, match=r"line 3: .*cannot be imported"):
        RuleSet.from_yaml(module / "rules.yaml")


def test_an_exception_in_check_is_told_with_rule_and_line(module):
    (module / "rules.yaml").write_text("rules:\n- {rule: answer}\n- {rule: rules_of_mine.Picky}\n")
    with pytest.raises(
        ConfigError, match=r"line 3: rule 'rules_of_mine.Picky' raised KeyError: 'most' \(rules_of_mine"
    ):
        RuleSet.from_yaml(module / "rules.yaml")


def short(row):
    return float(len(row.text) < 5)


def test_examples_that_hold_pass_and_others_are_told():
    rules.test(Call(short, isolate=False), paid=["yes", "no"], unpaid=["certainly"])
    rules.test(Math(), paid=["\\boxed{1/2}"], unpaid=["\\boxed{2}"], columns={"answer": "0.5"})
    with pytest.raises(AssertionError, match=r"'certainly' earns 0.0, not at least 1: ok"):
        rules.test(Call(short, isolate=False), paid=["yes", "certainly"])
    with pytest.raises(AssertionError, match=r"'yes' earns 1.0, not at most 0"):
        rules.test(Call(short, isolate=False), unpaid=["yes"])
    with pytest.raises(ValueError, match="no examples"):
        rules.test(Call(short))


TRL_FUNCTIONS = """
def polite(prompts, completions, **columns):
    return [float("please" in one) for one in completions]

def short(completions, **kwargs):
    return [1.0 for _ in completions]

def two(row, word):
    return 1.0

def fine(row, word="please"):
    return float(word in row.text)
"""


@pytest.mark.parametrize("name", ["polite", "short", "two"])
def test_a_function_of_trls_form_is_refused_with_the_form_of_a_rule(name, tmp_path, monkeypatch):
    (tmp_path / "functions_of_trl.py").write_text(TRL_FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        RuleSet.from_dict({"rules": [{"rule": "call", "function": f"functions_of_trl.{name}"}]})
    sentence = str(caught.value)
    assert f"{name} does not take one row. A rule's function is `def {name}(row)`, with `row.text`" in sentence
    assert "`f(prompts, completions, **columns)`, is no rule: give it as reward_funcs." in sentence
    fine = RuleSet.from_dict({"rules": [{"rule": "call", "function": "functions_of_trl.fine"}]})
    assert fine(completions=["please"]) == [1.0]
    sys.modules.pop("functions_of_trl", None)

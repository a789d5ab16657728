"""Answers to open questions: fields that contradict, and lists of golds in YAML."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, RuleSet

CAPITAL = "What is the capital of France?"


def test_a_match_that_is_unknown_or_has_no_effect_or_pays_lists_is_refused():
    with pytest.raises(RuleError, match="match is for kind: qa"):
        Answer(match="f1")
    with pytest.raises(RuleError, match="match is 'contains'"):
        Answer(kind="qa", match="contains")


def test_a_list_column_in_yaml_is_judged_through_a_rule_set(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {rule: answer, kind: qa, gold: aliases}\n", encoding="utf-8")
    rules = RuleSet.from_yaml(file)
    prompts = [[{"role": "user", "content": CAPITAL}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("The answer is Paris.", "Paris or Rome")]
    assert rules(prompts=prompts, completions=completions, aliases=[["Paris", "Lutetia"]] * 2) == [1.0, 0.0]
    rules.close()

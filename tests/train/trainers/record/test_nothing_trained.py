"""A run in which no step had a gradient says so, and why: on its page and on the console."""

import math

import pytest
from datasets import Dataset

from tests import grpo_trainers, recipes
from tests.conftest import ROOT
from trl_ext import RuleSet
from trl_ext.monitor.pages.verdict import HELP_PAGE
from trl_ext.monitor.report import read_log_history
from trl_ext.rewards import Answer, Length

ROWS = [row | {"answer": str(number)} for number, row in enumerate(recipes.PROMPTS)]


def gives_nan(completions, **_):
    return [math.nan] * len(completions)


gives_nan.on_unscored = "warn"

SAMPLED = dict(rollout_func=None, max_completion_length=4)
# What scores, and the first warning.
KINDS = {
    "all 0": (RuleSet([Answer(gold="answer")]), {}, "Rule 'answer' found no answer in 100% of the last completions."),
    "all 1": (
        RuleSet([Length(low=0, high=4000, unit="chars")]),
        {},
        "In 100% of the last groups all completions earned the same: these teach nothing. They earn the most",
    ),
    "all cut": (RuleSet([Length(high=3, slack=3)]), SAMPLED, "100% of the last completions were cut off at"),
    "NaN": (gives_nan, {}, "In 4 of 4 logged steps no completion had a reward: every reward function gave None"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_gradient_is_red_with_its_reason(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    monkeypatch.setenv("COLUMNS", "300")
    rewards, changes, reason = KINDS[kind]
    trainer = grpo_trainers.trainer(tmp_path, rewards=rewards, data=Dataset.from_list(ROWS), max_steps=4, **changes)
    trainer.train()
    headline = "Nothing was trained: 4 of 4 logged steps had no gradient"
    page = (tmp_path / "report.html").read_text()
    assert f'<strong class="worse">{headline}</strong>' in page and 'class="badge worse">Finished' in page
    assert page.split('<ul class="warnings"><li>')[1].replace("&#39;", "'").startswith(reason)
    said = capsys.readouterr().out
    assert headline in said and f"* {reason}" in said
    assert HELP_PAGE in said and HELP_PAGE in page and (ROOT / HELP_PAGE).is_file()
    assert ("rules/answer/no_answer_frac" in read_log_history(tmp_path)[0]) == (kind == "all 0")


def test_a_run_with_gradients_is_not_called_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    grpo_trainers.trained(tmp_path, max_steps=4)
    assert "was trained" not in capsys.readouterr().out

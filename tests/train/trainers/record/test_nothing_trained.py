"""A run in which no step had a gradient says so, and why: on its page and on the console."""

import math

import pytest
from datasets import Dataset

from tests import grpo_trainers, recipes
from trl_ext import RuleSet
from trl_ext.cli.main import main
from trl_ext.monitor.pages.samples import MOST_KEPT, read_samples
from trl_ext.monitor.record import read_log_history
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
        "In 100% of the last groups all completions earned the same: these teach nothing. All reach the maximum",
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
    assert ".md" not in said and ".md" not in page, "a page that no wheel holds"
    assert ("rules/answer/no_answer_frac" in read_log_history(tmp_path)[0]) == (kind == "all 0")


def test_a_run_with_gradients_is_not_called_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    grpo_trainers.trained(tmp_path, max_steps=4)
    assert "was trained" not in capsys.readouterr().out


def steps_kept(folder):
    return sorted({int(path.stem.split("_")[1]) for path in (folder / "completions").glob("*.parquet")})


def test_a_few_completions_of_the_first_and_last_step_are_kept_for_the_report(tmp_path, monkeypatch):
    """Its warning asks to read some, and `trl-ext score explain` reads one."""
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    rules = RuleSet([Answer(gold="answer")])
    trainer = grpo_trainers.trainer(tmp_path, rewards=rules, data=Dataset.from_list(ROWS), max_steps=4)
    trainer.train()
    assert steps_kept(tmp_path) == [1, 4]
    samples = read_samples(tmp_path, {"answer"})
    shown = [one for group in samples.groups.values() for one in group]
    assert {one.step for one in shown} == {1, 4} and len(shown) <= 2 * MOST_KEPT
    assert all(one.prompt and one.completion and one.gold["answer"] for one in shown)
    page = (tmp_path / "report.html").read_text()
    assert "Read the samples in report.html" in page and '<article class="card sample">' in page
    table = str(tmp_path / "completions" / "completions_00004.parquet")
    assert main(["score", "explain", str(tmp_path / "rules.yaml"), table, "--row", "1"]) == 0


@pytest.mark.parametrize("report, changes", [("0", {}), ("1", {"push_to_hub": True})])
def test_no_completion_is_kept_where_no_report_is_made_or_the_folder_is_pushed(report, changes, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", report)
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda *_, **__: None)
    monkeypatch.setattr("transformers.Trainer._push_from_checkpoint", lambda *_: None)
    grpo_trainers.trainer(tmp_path, max_steps=2, **changes).train()
    assert steps_kept(tmp_path) == []


def test_a_full_disk_does_not_end_a_run_that_keeps_completions(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    (tmp_path / "completions").write_text("a file where the folder would be")
    trainer = grpo_trainers.trainer(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2

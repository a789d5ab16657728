"""Presets are what they were chosen for and what their table says, and the README shows what commands print."""

import re
import shlex

import pytest
import yaml

from tests.conftest import ROOT
from trl_ext import RuleSet
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError
from trl_ext.memory.planner.presets import PRESETS, preset


@pytest.mark.parametrize("page", ["docs/memory.md", "docs/zh/memory.md"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_row_of_the_table_is_the_preset(name, page):
    lines = (ROOT / page).read_text().splitlines()
    (row,) = (line for line in lines if f"`{name}`" in line and line.startswith("| ") and "**" in line)
    one = PRESETS[name].plan()
    usable = one.estimate.hardware.card.usable_gib
    assert f" | `{name}` | {one.label} | **{one.estimate.peak_gib:.1f}** of {usable:.1f} |" in row


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/zh/memory.md", "docs/zh/reward.md"])
def test_a_page_shows_what_the_plan_prints(page, monkeypatch, capsys):
    command = r"```\n?(?:text\n\$ )?trl-ext (plan .*)\n(?:```\n\n```text\n)?([^`]*)```"
    shown = re.search(command, (ROOT / page).read_text())
    monkeypatch.setenv("COLUMNS", "110")
    assert main(shlex.split(shown[1])) == 0
    printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    wanted = [line for line in shown[2].splitlines() if line != "..."]
    missing = [line for line in wanted if line not in printed]  # in this order, since `in` takes from an iterator
    assert wanted and not missing


def test_the_readme_shows_what_its_rules_explain():
    text = (ROOT / "README.md").read_text()
    rules = RuleSet.from_dict(yaml.safe_load(re.search(r"```yaml\n(rules:.*?)```", text, flags=re.DOTALL)[1]))
    call, printed = re.search(r">>> print\(rules\.(explain\(.*\))\)\n([^`]*)```", text).groups()
    question, completion, gold = re.fullmatch(r'explain\("(.*)", "(.*)", answer="(.*)"\)', call).groups()
    assert str(rules.explain(question, completion, answer=gold)).split() == printed.split()


def test_an_unknown_preset_is_a_sentence_with_the_nearest():
    with pytest.raises(ConfigError, match="ppo-8b-4xa40-48gb"):
        preset("ppo-8b-4xa40")

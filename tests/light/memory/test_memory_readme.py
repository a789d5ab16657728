"""Presets are what they were chosen for and what their table says, and the README shows what commands print."""

import re
import shlex

import pytest
import yaml

from tests.conftest import ROOT
from trl_ext import RuleSet
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.planner.presets import PRESETS, preset
from trl_ext.memory.planner.search import technique

CASES = [name for name in PRESETS if "x" in name]


def cells(name):
    """Of a row: the preset's name, its settings, its GiB; the obvious settings and theirs."""
    one = PRESETS[name]
    found, obvious = one.plan(), one.obvious_estimate()
    usable = found.estimate.hardware.card.usable_gib
    return [
        f"`{name}`",
        found.label,
        f"**{found.estimate.peak_gib:.1f}** of {usable:.1f}",
        f"{technique(obvious.job)}: {obvious.peak_gib:.1f}",
    ]


@pytest.mark.parametrize("page", ["docs/memory.md", "docs/zh/memory.md"])
@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table_is_the_preset(name, page):
    lines = (ROOT / page).read_text().splitlines()
    rows = [line for line in lines if f"`{name}`" in line and line.startswith("| ") and "**" in line]
    assert len(rows) == 1
    wanted = " | ".join(cells(name))
    assert wanted in rows[0], f"the row should hold\n{wanted}\nand is\n{rows[0]}"


def test_the_tables_rows_are_all_cases():
    assert len(CASES) == 8  # PPO of two sizes, the reward model at two lengths


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


# The presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_the_obvious_settings_do_not_and_both_recompute_to_their_numbers(name):
    one = PRESETS[name]
    found, obvious = one.plan().estimate, one.obvious_estimate()
    assert found.fits and not obvious.fits
    assert found.peak_gib == pytest.approx(one.peak_gib, rel=0.02)
    assert obvious.peak_gib == pytest.approx(one.obvious_gib, rel=0.02)
    assert obvious.job.global_batch == one.job.global_batch


def test_every_size_of_card_has_a_preset():
    printed = {parse_gpus(one.gpus).card.name.rpartition("-")[2] for one in PRESETS.values()}
    assert {"24GB", "40GB", "48GB", "80GB", "96GB", "141GB"} <= printed


def test_an_unknown_preset_is_a_sentence_with_the_nearest():
    with pytest.raises(ConfigError, match="ppo-8b-4xa40-48gb"):
        preset("ppo-8b-4xa40")

"""The README's table of the six cases says what the presets say."""

import pytest

from tests.conftest import ROOT
from trl_ext.memory.planner.labels import technique
from trl_ext.memory.planner.presets import PRESETS

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


@pytest.mark.parametrize("readme", ["README.md", "README_zh.md"])
@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table_is_the_preset(readme, name):
    rows = [line for line in (ROOT / readme).read_text().splitlines() if f"`{name}`" in line and line.startswith("|")]
    assert len(rows) == 1
    wanted = " | ".join(cells(name))
    assert wanted in rows[0], f"the row should hold\n{wanted}\nand is\n{rows[0]}"


def test_the_tables_rows_are_the_six_cases():
    assert len(CASES) == 8  # PPO of two sizes, the reward model at two lengths

"""The pictures of README and docs show today's numbers."""

import runpy

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "docs/assets"


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(FOLDER / "pictures.py"))


def test_the_padding_picture_counts_what_the_planner_of_rows_counts(pictures):
    padded, flat = pictures["token_counts"]()
    text = (FOLDER / "padding.svg").read_text()
    assert f"{padded:,} tokens" in text and f"{flat:,} tokens" in text
    assert f"{padded:,} tokens padded, {flat:,} tokens" in (ROOT / "README.md").read_text()


def test_the_memory_picture_shows_the_presets(pictures):
    text = (FOLDER / "memory.svg").read_text()
    for name, preset, obvious, _ in pictures["memory_rows"]():
        assert name in text and f">{preset:.1f}<" in text and f">{obvious:.1f}<" in text


def test_the_family_picture_has_every_method_over_equal_episodes(pictures):
    text = (FOLDER / "family.svg").read_text()
    curves = pictures["family_curves"]()
    assert list(curves) == ["PPO", "REINFORCE++", "RLOO", "GRPO"]
    page = (ROOT / "docs/ppo.md").read_text()
    for method, (episodes, seeds) in curves.items():
        assert f">{method}<" in text and len(seeds) == 3
        assert all(len(curve) == len(episodes) for curve in seeds)
        mean = sum(curve[-1] for curve in seeds) / 3
        assert f"{method} {100 * mean:.1f} %" in page

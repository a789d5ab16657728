"""Presets are frozen plans: what they were chosen for still holds."""

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.planner.presets import PRESETS, preset

TOLERANCE = 0.02


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_the_obvious_settings_do_not_and_both_recompute_to_their_numbers(name):
    one = PRESETS[name]
    found, obvious = one.plan().estimate, one.obvious_estimate()
    assert found.fits and not obvious.fits
    assert found.peak_gib == pytest.approx(one.peak_gib, rel=TOLERANCE)
    assert obvious.peak_gib == pytest.approx(one.obvious_gib, rel=TOLERANCE)
    assert obvious.job.global_batch == one.job.global_batch


def test_every_size_of_card_has_a_preset():
    printed = {parse_gpus(one.gpus).card.name.rpartition("-")[2] for one in PRESETS.values()}
    assert {"24GB", "40GB", "48GB", "80GB", "96GB", "141GB"} <= printed


def test_an_unknown_preset_is_a_sentence_with_the_nearest():
    with pytest.raises(ConfigError, match="ppo-8b-4xa40-48gb"):
        preset("ppo-8b-4xa40")

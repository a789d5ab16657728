"""A run that is killed anywhere and resumed is the run that nobody killed, bit for bit.

Equal are weights, optimizer, statistics, random state and every logged number.

Each trainer is killed at a hundred random points and at fifty chosen ones; here one trainer a day at a share of them,
PPO with another critic each time, and every one at all of them with `TRL_EXT_THOROUGH=1`. At some, SIGTERM or Ctrl-C
comes instead of the kill: the run saves, ends with its own code, and goes on as exactly.
"""

import signal
from datetime import date

import pytest

from tests.faults import damaged, killed
from tests.faults.starting import IS_THOROUGH, found_by
from tests.nightly import daily
from trl_ext.errors import SAVED_ON_SIGNAL

# First point, and every which.
POINTS = {"grpo": (1, 24), "reward": (5, 24), "ppo_head": (2, 28), "ppo_separate": (13, 28), "ppo_adapter": (15, 28)}
# Of each trainer's 70 to 100 damaged or foreign checkpoints some, too.
CASES = {"grpo": (0, 8), "reward": (1, 8), "ppo_head": (2, 12), "ppo_separate": (6, 12), "ppo_adapter": (10, 12)}
TODAY = date.today().toordinal()
CRITICS = [kind for kind in POINTS if kind.startswith("ppo")]
KINDS = ("grpo", "reward", CRITICS[TODAY // 3 % 3])
# How the first runs end.
CODES = {"chosen": -signal.SIGKILL, "random": -signal.SIGKILL, "signal": SAVED_ON_SIGNAL}


@pytest.mark.parametrize("kind", daily(POINTS, KINDS[TODAY % 3]))
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(kind, tmp_path):
    found = found_by("killed", killed.FILE, tmp_path / kind, kind, *((0, 1) if IS_THOROUGH else POINTS[kind]))
    assert {one["part"] for one in found} == set(CODES)
    assert [one for one in found if one["code"] != CODES[one["part"]]] == []
    assert any("_unfinished" in one["left"] for one in found), "no run was killed while it saved"
    assert [one for one in found if one["differences"]] == []


@pytest.mark.nightly
def test_so_is_one_whose_next_samples_were_under_way(tmp_path):
    found = found_by("killed", killed.FILE, tmp_path, "grpo_ahead", *((0, 1) if IS_THOROUGH else (3, 60)))
    assert found and [one for one in found if one["code"] != CODES[one["part"]] or one["differences"]] == []


@pytest.mark.parametrize("kind", daily(POINTS, KINDS[(TODAY + 1) % 3]))
def test_a_damaged_or_foreign_checkpoint_is_refused_or_passed_over_in_words(kind, tmp_path):
    """It is refused in one sentence, or an older whole one is taken, and that is said."""
    found = found_by("damaged", damaged.FILE, tmp_path / kind, kind, *((0, 1) if IS_THOROUGH else CASES[kind]))
    assert len(found) >= 5
    assert {name: fault for name, fault in found.items() if fault} == {}

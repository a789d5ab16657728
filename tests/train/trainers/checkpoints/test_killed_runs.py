"""A run that is killed anywhere and resumed is the run that nobody killed, bit for bit.

Equal are weights, optimizer, statistics, random state and every logged number.

Each trainer is killed at a hundred random points and at fifty chosen ones; here at a twelfth of them, PPO's critics
at a share of that, and at all of them with `TRL_EXT_THOROUGH=1`. At some, SIGTERM or Ctrl-C comes instead of the kill:
the run saves, ends with a code of its own, and goes on as exactly.
"""

import signal

import pytest

from tests.faults.killed import FILE
from tests.faults.starting import IS_THOROUGH, found_by
from trl_ext.errors import SAVED_ON_SIGNAL

# First point, and every which.
POINTS = {"grpo": (1, 12), "reward": (5, 12), "ppo_head": (2, 28), "ppo_separate": (13, 28), "ppo_adapter": (15, 28)}
# How the first runs end.
CODES = {"chosen": -signal.SIGKILL, "random": -signal.SIGKILL, "signal": SAVED_ON_SIGNAL}


@pytest.mark.parametrize("kind", POINTS)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(kind, tmp_path):
    found = found_by("killed", FILE, tmp_path / kind, kind, *((0, 1) if IS_THOROUGH else POINTS[kind]))
    assert {one["part"] for one in found} == set(CODES)
    assert [one for one in found if one["code"] != CODES[one["part"]]] == []
    assert any("_unfinished" in one["left"] for one in found), "no run was killed while it saved"
    assert [one for one in found if one["differences"]] == []

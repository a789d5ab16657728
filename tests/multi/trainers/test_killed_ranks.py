"""A run of two processes of which one or both are killed, and resumed, is the run that nobody killed, bit for bit.

`TRL_EXT_THOROUGH=1` kills at more points, and under ZeRO-2 also the other trainers.
"""

import signal

import pytest

from tests.faults.killed import FILE
from tests.faults.starting import IS_THOROUGH, found_by
from tests.multi.launching import JSONS, skip_what_cannot_run

# First point, and every which of a trainer's 147 to 170. Each costs two whole runs of two processes: no process of a
# group can be forked.
POINTS = {"ppo_adapter": (23, 200)}
if IS_THOROUGH:
    POINTS = {"grpo": (0, 4), "reward": (1, 4), "ppo_head": (2, 8), "ppo_separate": (3, 8), "ppo_adapter": (1, 8)}
POINTS_OF_ZERO = {"grpo": (25, 200)}
if IS_THOROUGH:
    POINTS_OF_ZERO = {"grpo": (2, 16), "reward": (3, 16), "ppo_separate": (1, 16)}


def check(found):
    assert found
    assert [one for one in found if one["code"] != -signal.SIGKILL] == []
    assert [one for one in found if one["differences"]] == []


@pytest.mark.parametrize("kind", POINTS)
def test_a_run_of_two_processes_that_is_killed_and_resumed_is_the_run_that_was_not(kind, tmp_path):
    check(found_by("ranks", FILE, tmp_path / kind, kind, *POINTS[kind]))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", POINTS_OF_ZERO)
def test_so_is_a_run_under_zero2(kind, tmp_path):
    skip_what_cannot_run("zero2")
    check(found_by("ranks", FILE, tmp_path / kind, kind, *POINTS_OF_ZERO[kind], JSONS["zero2"]))

"""GRPO on two ranks with rules that raise, hang, spin, return a string or NaN, exit, or kill their process."""

import re

import pytest

from tests.multi.programs.hostile_rules import WAYS
from tests.multi.trainers.test_fail_together import launch
from tests.multi.warm import warm_python

NUM_STEPS = 16


@pytest.fixture(scope="module")
def going_on(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("floor"))
    done = launch(
        "-m", "tests.multi.programs.hostile_worker", folder, "floor", str(NUM_STEPS), python=str(warm_python())
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_told_to_go_on_the_run_makes_all_its_steps_with_finite_weights(going_on):
    for rank in (0, 1):
        assert f"rank {rank} made {NUM_STEPS} steps, weights finite" in going_on


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_fail_was_met_and_counted(way, going_on):
    assert f"rank 0 {way} failed True" in going_on


def test_told_to_stop_all_ranks_stop_at_once_with_the_rules_name(tmp_path):
    done = launch(
        "-m", "tests.multi.programs.hostile_worker", str(tmp_path), "stop", str(NUM_STEPS), python=str(warm_python())
    )
    assert done.returncode != 0
    assert "KeyError: 'gold'" in done.stdout and "Rule 'raise'" in done.stdout
    # Both have said so before the launch's time was up, and long before that of the process group.
    assert sorted(re.findall(r"rank (\d) trained for", done.stdout)) == ["0", "1"]

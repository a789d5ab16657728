"""Rules on two ranks: running statistics equal on both and after a resume; what scored nothing is judged together.

Groups are compared as in one process, and a rule that misbehaves ends no process.
"""

import re

import pytest

from tests.multi.jobs.rules import NUM_STEPS
from tests.multi.launching import ended, job_command, run_job
from tests.multi.programs.hostile_rules import WAYS

ROWS_PER_STEP = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_job("rules", "cpu", tmp_path_factory.mktemp("rules")).ranks


def test_both_ranks_know_all_totals_of_the_training(ranks):
    first, second = (facts["whole"]["moments"] for facts in ranks)
    assert first == second
    assert first[0] == NUM_STEPS * ROWS_PER_STEP


def test_a_resumed_run_scores_like_the_uninterrupted_one(ranks):
    for facts in ranks:
        assert facts["resumed"] == facts["whole"]
    assert len(set(ranks[0]["whole"]["rewards"])) == NUM_STEPS


def test_a_rule_that_scores_on_one_rank_is_fine(ranks):
    assert [facts["one"] for facts in ranks] == [f"{NUM_STEPS} steps"] * 2


def test_a_rule_that_scores_on_no_rank_ends_both_with_one_sentence(ranks):
    first, second = (facts["both"] for facts in ranks)
    assert first == second
    assert f"'abstains_on' scored none of the {ROWS_PER_STEP} completions of the first step" in first


def test_groups_are_compared_as_in_one_process_and_none_is_shared(ranks):
    found, other = (facts["compared"] for facts in ranks)
    assert found["by_rank"] == found["alone"] and len(found["alone"]) > NUM_STEPS
    assert {value for batch in found["alone"] for value in batch} > {0.0, 1.0}
    assert "whole groups of 2 or more" in found["refused"] and found["refused"] == other["refused"]


# Rules that raise, hang, spin, return a string or NaN, exit, or kill their process -----------------------------------


def test_told_to_go_on_the_run_makes_all_its_steps_with_finite_weights_and_counts_every_way_to_fail(tmp_path):
    run = run_job("hostile rules", "cpu", tmp_path, on_error="floor", num_steps=8)
    assert run.ranks == [{"steps": 8, "finite": True, "failed": list(WAYS)}] * 2


def test_told_to_stop_all_ranks_stop_at_once_with_the_rules_name(tmp_path):
    done = ended(job_command("hostile rules", "cpu", tmp_path, on_error="stop", num_steps=8))
    assert done.returncode != 0
    assert "KeyError: 'gold'" in done.stderr and "Rule 'raise'" in done.stderr
    # Both have said so before the launch's time was up, and long before that of the process group.
    assert sorted(re.findall(r"rank (\d) trained for", done.stdout)) == ["0", "1"]

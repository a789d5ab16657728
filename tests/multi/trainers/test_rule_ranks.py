"""Rules on two ranks: running statistics equal on both and after a resume; what scored nothing is judged together.

Groups are compared as in one process.
"""

import json

import pytest

from tests.multi.programs.rule_ranks_worker import NUM_STEPS
from tests.multi.trainers.test_fail_together import launch
from tests.multi.warm import warm_python

ROWS_PER_STEP = 4


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rule_ranks")
    done = launch("-m", "tests.multi.programs.rule_ranks_worker", str(folder), python=str(warm_python()))
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((folder / "facts.json").read_text())


def test_both_ranks_know_all_totals_of_the_training(facts):
    first, second = facts["whole"]["moments"]
    assert first == second
    assert first[0] == NUM_STEPS * ROWS_PER_STEP


def test_a_resumed_run_scores_like_the_uninterrupted_one(facts):
    assert facts["resumed"]["moments"] == facts["whole"]["moments"]
    assert facts["resumed"]["rewards"] == facts["whole"]["rewards"]
    assert len(set(facts["whole"]["rewards"])) == NUM_STEPS


def test_a_rule_that_scores_on_one_rank_is_fine(facts):
    assert facts["one"] == [f"{NUM_STEPS} steps"] * 2


def test_a_rule_that_scores_on_no_rank_ends_both_with_one_sentence(facts):
    first, second = facts["both"]
    assert first == second
    assert f"'abstains_on' scored none of the {ROWS_PER_STEP} completions of the first step" in first


def test_groups_are_compared_as_in_one_process_and_none_is_shared(facts):
    found = facts["compared"]
    assert found["by_rank"] == found["alone"] and len(found["alone"]) > NUM_STEPS
    assert {value for batch in found["alone"] for value in batch} > {0.0, 1.0}
    assert "whole groups of 2 or more" in found["refused"][0] and found["refused"][0] == found["refused"][1]

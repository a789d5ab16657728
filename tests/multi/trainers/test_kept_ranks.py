"""Prompts that go through the model once for all forwards of a step: weights as without, over processes and ZeRO.

Rows change ranks; the ratio of a policy that has not moved is 1 to the bit in bfloat16, in each update.
"""

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.multi.jobs.kept import CASES, UNMOVED, save_models
from tests.multi.launching import distance, run_job

TOLERANCE = 1e-6
RUN = list(CASES) if IS_THOROUGH else ["rows that stay", "zero3", "out of memory"]
STILL = list(UNMOVED) if IS_THOROUGH else ["ddp"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    save_models(folder)
    return run_job("kept", "cpu", folder / "out", models=folder, cases=RUN, still=STILL).facts


@pytest.mark.parametrize("case", RUN)
def test_weights_are_those_of_prompts_forwarded_again(facts, case):
    kept, again = facts[case, True], facts[case, False]
    assert sum(kept["prefix_groups"]) >= 2 and not sum(again["prefix_groups"])
    assert sum(kept["tokens"]) < 0.9 * sum(again["tokens"])
    assert distance(kept["weights"], again["weights"]) <= TOLERANCE
    assert kept["level"] == (case == "out of memory")


@pytest.mark.parametrize("case", STILL)
def test_no_token_is_clipped_before_anything_moved(facts, case):
    steps = facts[case]
    assert len(steps) == 8 and all(step["grad_norm"] > 0 for step in steps)
    assert [step["clip_ratio/region_mean"] for step in steps] == [0.0] * 8
    assert [step["kl"] for step in steps if "kl" in step] == [0.0] * 8 * ("beta" in UNMOVED[case])

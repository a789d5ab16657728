"""What would fit instead: changes that keep the optimisation, cheapest first, with the planner's numbers."""

import re
from dataclasses import replace

import pytest

from tests.plans import FULL, named_stage, planned
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.planner.alternatives import alternatives, next_stage
from trl_ext.memory.units import gib

pytestmark = pytest.mark.slow


def test_there_are_three_alternatives_of_different_kinds_cheapest_first_that_keep_what_the_optimisation_sees():
    found = alternatives(planned(**FULL).estimate, "update")
    assert len(found) == 3
    assert [one.estimate.step_s for one in found] == sorted(one.estimate.step_s for one in found)
    assert all(one.saves_gib > 0 for one in found)
    text = " ".join(one.key for one in found)
    assert not any(word in text for word in ("lora", "length", "num_generations", "optim=", "beta"))
    found = alternatives(planned(**FULL).estimate, "generate")
    assert len({one.kind for one in found}) == len(found)
    assert not any("per_device_train_batch_size" in one.key for one in found)


def test_an_alternative_saves_what_the_planner_says_and_stands_back_if_that_is_less_than_was_asked_for():
    run = planned(**FULL, expandable_segments=False)
    most = max(one.saves_gib for one in alternatives(run.estimate, "update"))
    assert all(one.saves_gib >= most for one in alternatives(run.estimate, "update", asked_gib=most))
    assert alternatives(run.estimate, "update", asked_gib=1e9) == alternatives(run.estimate, "update")
    run = planned(**FULL, expandable_segments=False)
    found = next(one for one in alternatives(run.estimate, "") if one.key.startswith("PYTORCH_CUDA_ALLOC_CONF"))
    then = run.what_if(expandable_segments=True)
    assert found.estimate.need_bytes == pytest.approx(then.need_bytes)
    assert found.saves_gib == pytest.approx(gib(run.estimate.need_bytes - then.need_bytes))


def test_what_costs_no_time_and_fits_comes_first_and_what_does_not_fit_last():
    """Segments that expand need no restart under another launch file, even one that is a little faster by the plan."""
    run = planned(**FULL | dict(zero_stage=3, checkpoint_every=1), expandable_segments=False)
    card = replace(run.estimate.hardware.card, total_gib=gib(run.what_if(expandable_segments=True).need_bytes) + 1.5)
    tight = estimate(run.job, run.estimate.shape, replace(run.estimate.hardware, card=card, headroom_frac=0.0))
    assert not tight.fits
    found = alternatives(tight)
    assert found[0].kind == "allocator" and found[0].estimate.fits
    assert min(one.estimate.step_s for one in found) < tight.step_s
    assert [one.estimate.fits for one in found] == sorted((one.estimate.fits for one in found), reverse=True)


def test_the_next_stage_is_the_next_one_that_fits_or_the_next_one_and_after_the_last_there_is_none():
    assert named_stage(**FULL | dict(zero_stage=0, dtype="float32")) == named_stage(**FULL)
    assert re.fullmatch(r"ZeRO-3, all weights, micro-batch 1 x 16, checkpointing: \d+\.\d GiB", named_stage(**FULL))
    assert next_stage(planned(**FULL | dict(zero_stage=3, offload="all")).estimate) is None
    then = next_stage(planned(**FULL | dict(zero_stage=1, offload="optimizer")).estimate)
    assert (then.job.zero_stage, then.job.offload) == (2, "optimizer")
    stage = named_stage(**FULL | dict(zero_stage=1), max_completion_length=131072 - 1024)
    assert stage.startswith("ZeRO-2, all weights, micro-batch 1")


def test_a_micro_batch_becomes_its_largest_part_and_the_global_batch_stays():
    run = planned(**FULL | dict(zero_stage=3, offload="all", checkpoint_every=1, global_batch=288))
    for size, smaller, steps in ((2, 1, 72), (4, 2, 36), (6, 3, 24), (9, 3, 24), (8, 4, 18)):
        now = run.what_if(per_device_train_batch_size=size)
        changes = [one.key for one in alternatives(now, "update") if one.kind == "batch"]
        assert changes == [f"per_device_train_batch_size={smaller} gradient_accumulation_steps={steps}"]

"""What the error says: the phase it rose in, and what would fit, with the planner's numbers."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trl_ext.memory import plan
from trl_ext.memory.estimate import quick_estimate
from trl_ext.memory.planner.labels import label
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.run.alternatives import alternatives, next_stage
from trl_ext.memory.units import gib
from trl_ext.trainers.memory.oom.errors import ELSEWHERE, PLACES, place_of
from trl_ext.trainers.memory.oom.message import GENERAL, cheapest_change, explained

GPUS = "4xA40-48GB"
LLAMA = dict(max_prompt_length=1024, max_completion_length=1024)


def planned(**settings) -> Plan:
    """A run of Llama-3-8B on four A40, whether it fits or not."""
    best = plan("grpo", "meta-llama/Meta-Llama-3-8B", GPUS, allow=["lora"], **LLAMA).best
    job = replace(best.job, **settings)
    return Plan(quick_estimate(job, best.estimate.shape, best.estimate.hardware))


def named_stage(**settings) -> str:
    """The next stage and offload, as the message names it."""
    found = next_stage(planned(**settings).estimate)
    return f"{label(found.job, 4)}: {gib(found.need_bytes):.1f} GiB"


FULL = dict(method="full", zero_stage=2, offload="none", per_device_train_batch_size=4, checkpoint_every=0)


def test_there_are_three_remedies_cheapest_first_and_each_saves_memory():
    found = alternatives(planned(**FULL).estimate, "update")
    assert len(found) == 3
    assert [one.estimate.step_s for one in found] == sorted(one.estimate.step_s for one in found)
    assert all(one.saves_gib > 0 for one in found)


def test_remedies_keep_what_the_optimisation_sees():
    text = " ".join(one.change for one in alternatives(planned(**FULL).estimate, "update"))
    for word in ("lora", "length", "num_generations", "optim=", "beta"):
        assert word not in text


def test_a_smaller_micro_batch_comes_with_more_accumulation():
    run = planned(**FULL)
    run = replace(run, estimate=run.what_if(expandable_segments=True, checkpoint_every=1, zero_stage=3, offload="all"))
    settings = next(one.change for one in alternatives(run.estimate, "update") if "per_device" in one.change)
    size, steps = map(int, re.findall(r"=(\d+)", settings))
    assert size == run.job.per_device_train_batch_size // 2
    assert size * steps * 4 == run.job.global_batch


def test_a_remedy_that_frees_less_than_was_asked_for_stands_back():
    run = planned(**FULL, expandable_segments=False)
    most = max(one.saves_gib for one in alternatives(run.estimate, "update"))
    assert all(one.saves_gib >= most for one in alternatives(run.estimate, "update", asked_gib=most))
    assert alternatives(run.estimate, "update", asked_gib=1e9) == alternatives(run.estimate, "update")


def test_of_several_of_a_kind_the_cheapest_is_enough():
    kinds = [one.kind for one in alternatives(planned(**FULL).estimate, "generate")]
    assert len(set(kinds)) == len(kinds)


def test_a_remedy_is_one_for_the_phase_that_ran_out():
    run = planned(**FULL)
    generating = [one.change for one in alternatives(run.estimate, "generate")]
    assert not any("per_device_train_batch_size" in change for change in generating)


def test_what_a_remedy_saves_is_what_the_planner_says():
    run = planned(**FULL, expandable_segments=False)
    found = next(one for one in alternatives(run.estimate, "") if one.change.startswith("PYTORCH_CUDA_ALLOC_CONF"))
    then = run.what_if(expandable_segments=True)
    assert found.need_gib == pytest.approx(gib(then.need_bytes))
    assert found.saves_gib == pytest.approx(gib(run.estimate.need_bytes - then.need_bytes))


def test_the_next_stage_is_the_next_one_that_fits_at_its_most_frugal():
    assert named_stage(**FULL | dict(zero_stage=0, dtype="float32")) == named_stage(**FULL)
    assert re.fullmatch(r"ZeRO-3, all weights, micro-batch 1 x 16, checkpointing: \d+\.\d GiB", named_stage(**FULL))


def test_after_the_last_stage_there_is_none():
    assert next_stage(planned(**FULL | dict(zero_stage=3, offload="all")).estimate) is None


def test_a_stage_that_is_not_in_the_order_has_no_next_one_either():
    assert next_stage(planned(**FULL | dict(zero_stage=1, offload="optimizer")).estimate) is None


def test_where_no_stage_fits_the_next_one_is_named_all_the_same():
    stage = named_stage(**FULL | dict(zero_stage=1), max_completion_length=131072 - 1024)
    assert stage.startswith("ZeRO-2, all weights, micro-batch 1")


@pytest.mark.parametrize(("size", "smaller", "steps"), [(4, 2, 36), (6, 3, 24), (9, 3, 24), (8, 4, 18)])
def test_a_micro_batch_becomes_its_largest_part_and_the_global_batch_stays(size, smaller, steps):
    run = planned(**FULL | dict(zero_stage=3, offload="all", checkpoint_every=1, global_batch=288))
    now = run.what_if(per_device_train_batch_size=size)
    changes = [one.change for one in alternatives(now, "update") if one.kind == "batch"]
    assert changes == [f"per_device_train_batch_size={smaller} gradient_accumulation_steps={steps}"]


# The sentences ----------------------------------------------------------------------------------------------------


def trainer(folder, memory_plan=None) -> SimpleNamespace:
    args = SimpleNamespace(
        memory_plan=memory_plan, output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    accelerator = SimpleNamespace(
        num_processes=4, process_index=1, state=SimpleNamespace(deepspeed_plugin=None), distributed_type="MULTI_GPU"
    )
    chunks = SimpleNamespace(num_rows=lambda batch: 4, num_tokens=lambda batch: 8192)
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        state=SimpleNamespace(global_step=11),
        model=SimpleNamespace(config=SimpleNamespace(_name_or_path="llama")),
        _rescue=SimpleNamespace(batch={}, chunks=chunks, why_not="memory_on_oom is 'raise'", num_chunks=1),
    )


def raised_in(name: str) -> torch.OutOfMemoryError:
    """The allocator's error, through a function of this name."""

    def compute_loss():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB.")

    function = type(compute_loss)(compute_loss.__code__.replace(co_name=name), {"torch": torch})
    try:
        function()
    except torch.OutOfMemoryError as error:
        return error


def test_the_message_names_place_numbers_changes_and_the_next_stage(tmp_path):
    run = planned(**FULL)
    text = str(explained(raised_in("compute_loss"), trainer(tmp_path, run)))
    opening = "Out of memory in the forward: step 12, rank 1, 4 rows of 8,192 tokens together. 1.96 GiB asked for. "
    assert text.startswith(opening)
    for i, one in enumerate(alternatives(run.estimate, "update", 1.96), 1):
        assert f"({i}) {one.change}: {one.saves_gib:.1f} GiB less there, {one.need_gib:.1f} in all" in text
    assert f"The next ZeRO stage or offload: {named_stage(**FULL)}." in text
    assert text.endswith(f"Snapshot: {tmp_path / 'oom-step12-rank1.json'}.")


def test_without_a_plan_it_names_the_general_remedies(tmp_path):
    text = str(explained(raised_in("_generate"), trainer(tmp_path)))
    assert GENERAL["generate"] in text
    assert "docs/oom.md" in text
    assert "next ZeRO stage" not in text


def test_where_memory_is_short_the_cheapest_change_is_named_with_what_it_needs(tmp_path):
    run = planned(**FULL)
    cheapest = alternatives(run.estimate)[0]
    hint = cheapest_change(trainer(tmp_path, run))
    assert f"set {cheapest.change} ({gib(cheapest.estimate.need_bytes):.1f} GiB by the plan)" in hint


def test_without_a_plan_the_micro_batch_becomes_smaller_and_then_there_are_general_remedies(tmp_path):
    run = trainer(tmp_path)
    sizes = "per_device_train_batch_size=2 gradient_accumulation_steps=4"
    assert cheapest_change(run) == f"set {sizes}; the optimisation stays the same."
    run.args.per_device_train_batch_size = 1
    assert GENERAL[""] in cheapest_change(run)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.words)
def test_a_place_is_known_by_each_of_its_functions(place):
    for name in place.functions:
        assert place_of(raised_in(name)) is place


def test_what_rises_nowhere_in_particular_is_elsewhere():
    assert place_of(raised_in("anything")) is ELSEWHERE

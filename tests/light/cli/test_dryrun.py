"""`trl-ext dryrun` answers for its help without torch, and what it says of reserved memory follows from a trace."""

import subprocess
import sys

import pytest

from trl_ext.cli.dryrun.reserved import Allocated, reserved_beside_the_other, segments_expand
from trl_ext.cli.dryrun.text import verdict
from trl_ext.memory.formulas.peak import slack_share
from trl_ext.memory.job import Job
from trl_ext.twin.driver import TwinPeak, TwinResult
from trl_ext.twin.trace import Trace

CODE = "import sys, {module}; sys.exit('torch' in sys.modules)"
GIB = 2**30
MODULES = ["trl_ext.twin", "trl_ext.cli.dryrun.command", "trl_ext.cli.dryrun.reserved", "trl_ext.cli.dryrun.text"]


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_imports_no_torch(module):
    assert subprocess.run([sys.executable, "-c", CODE.format(module=module)], check=False).returncode == 0


# Reserved ---------------------------------------------------------------------------------------------------------


def tenants():
    """Four times 6 GiB come and go, and 4 GiB stay in their place: native segments cannot go back, and 18 GiB are
    allocated at the peak."""
    trace = Trace()
    trace.begin("update")
    for _ in range(4):
        trace.free(trace.allocate(6 * GIB))
        trace.allocate(4 * GIB)
    return TwinResult({"update": TwinPeak(18 * GIB, "", "")}, trace=trace)


def larger_ones():
    """Three ever larger ones, one at a time: a native cache keeps them all."""
    trace = Trace()
    trace.begin("update")
    for size in (4, 5, 6):
        trace.free(trace.allocate(size * GIB))
    return TwinResult({"update": TwinPeak(6 * GIB, "", "")}, trace=trace)


def answer_of(result, usable_gib, expandable=False, vllm_gib=0.0, job=None, **phases_gib):
    phases_gib = phases_gib or {"update": result.peak_gib + vllm_gib}
    allocated = Allocated(phases_gib, vllm_gib, usable_gib, job, result)
    return reserved_beside_the_other(allocated, expandable)


def said(result, **question):
    found = answer_of(result, **question)
    numbers = {"peak_gib": result.peak_gib, "usable_gib": question["usable_gib"], "seconds": 0.0, "formula_gib": None}
    return verdict({**found, **numbers})


def test_the_replica_decides_and_the_other_policy_stands_beside_it():
    answer = answer_of(tenants(), usable_gib=20)
    assert not answer["fits"]
    assert answer["reserved_basis"] == "allocator replica"
    assert answer["reserved_gib"] == 24
    assert answer["other_policy"]["fits"]
    assert answer["other_policy"]["reserved_gib"] == pytest.approx(18, abs=0.02)


def test_a_run_that_fits_by_emptying_its_cache_says_so():
    answer = answer_of(larger_ones(), usable_gib=10)
    assert answer["fits"]
    assert answer["alloc_retries"] == 1
    assert answer["reserved_gib"] <= 10
    sentence = said(larger_ones(), usable_gib=10)
    assert sentence.startswith("fits, but the allocator has to empty its cache once in three steps")
    assert "set expandable_segments:True" in sentence


def test_a_larger_card_needs_no_emptying():
    answer = answer_of(larger_ones(), usable_gib=15)
    assert (answer["alloc_retries"], answer["reserved_gib"]) == (0, 15)


def test_vllms_share_is_taken_off_the_cap_and_added_to_what_is_told():
    assert answer_of(larger_ones(), usable_gib=19, vllm_gib=4)["reserved_gib"] == 19
    assert answer_of(larger_ones(), usable_gib=18, vllm_gib=4)["alloc_retries"] == 1
    assert not answer_of(larger_ones(), usable_gib=9, vllm_gib=4)["fits"]


def test_where_the_twin_refuses_the_share_answers():
    job = Job("reward", zero_stage=2)
    answer = answer_of(TwinResult({}, refusal="No."), usable_gib=20, job=job, update=10.0, step=8.0)
    shares = {expands: slack_share(Job("reward", zero_stage=2, expandable_segments=expands)) for expands in (0, 1)}
    assert answer["reserved_basis"] == "share"
    assert answer["phases"] == pytest.approx({"update": 10 * (1 + shares[0]), "step": 8 * (1 + shares[0])})
    assert answer["other_policy"]["reserved_gib"] == pytest.approx(10 * (1 + shares[1]))


def test_a_phase_that_the_twin_has_not_counted_is_estimated_and_may_decide():
    answer = answer_of(larger_ones(), usable_gib=40, update=6.0, generate=30.0)
    assert answer["reserved_basis"] == "share"
    assert answer["reserved_gib"] == pytest.approx(33)
    assert answer["phases"]["update"] == 15
    assert not answer_of(larger_ones(), usable_gib=32, update=6.0, generate=30.0)["fits"]


def test_the_verdict_names_both_numbers_the_policy_and_the_other_one():
    sentence = said(tenants(), usable_gib=20)
    assert sentence.startswith("does not fit: 18.0 GiB allocated at the peak, 24.0 reserved with native segments, on")
    assert sentence.endswith("With expandable_segments:True 18.0 would be reserved, which fits.")


def test_a_policy_that_differs_by_little_is_not_mentioned():
    trace = Trace()
    trace.begin("update")
    trace.allocate(20 * GIB)
    result = TwinResult({"update": TwinPeak(20 * GIB, "", "")}, trace=trace)
    assert "would" not in said(result, usable_gib=40)


def test_the_formulas_two_numbers_stand_behind_the_twins():
    answer = {**answer_of(larger_ones(), usable_gib=40), "peak_gib": 6.0, "usable_gib": 40, "seconds": 0.0}
    sentence = verdict({**answer, "formula_gib": 6.2, "formula_with_slack_gib": 6.5})
    assert "6.0 GiB allocated at the peak" in sentence and "on a card with 40.0 GiB usable." in sentence
    assert sentence.endswith("By the formulas, of which `trl-ext check` and `plan` tell: 6.2 GiB, 6.5 with slack.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "flag", "stage"), [(None, None, None), ("zero3", None, 3), (None, "zero2", 2), ("zero3", "zero2", 2)]
)
def test_the_launch_file_of_a_recipe_is_read_and_a_flag_wins(named, flag, stage, tmp_path):
    from trl_ext.twin.from_recipe import recipe_of

    lines = ["model_name_or_path: Qwen/Qwen2.5-0.5B", *([f"config_file: {named}"] if named else [])]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    recipe = recipe_of(str(tmp_path / "recipe.yaml"), 2, "reward", None, None, None, flag)
    assert recipe.has_launch == bool(named or flag)
    assert ((recipe.deepspeed or {}).get("zero_optimization") or {}).get("stage") == stage


# The policy of a run ----------------------------------------------------------------------------------------------

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("variables", "recipe", "expands"),
    [
        ({}, "beta: 0.0", False),
        ({VARIABLE: "expandable_segments:True"}, "beta: 0.0", True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, "beta: 0.0", True),
        ({}, f"env:\n  {VARIABLE}: expandable_segments:True", True),
        ({VARIABLE: "expandable_segments:True"}, f"env:\n  {VARIABLE}: expandable_segments:False", False),
        ({}, "memory: auto", True),
        ({VARIABLE: "expandable_segments:False"}, "memory: auto", False),
    ],
)
def test_whether_segments_expand_is_said_by_environment_recipe_or_memory(
    variables, recipe, expands, tmp_path, monkeypatch
):
    for name in (VARIABLE, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "mine.yaml"
    path.write_text(recipe)
    assert segments_expand(str(path)) is expands


@pytest.mark.parametrize("expandable", [False, True])
def test_a_recipe_beside_its_plan_runs_as_the_plan_launches_it(expandable, tmp_path, monkeypatch):
    from trl_ext.memory import Hardware, find_card
    from trl_ext.memory.estimate import estimate
    from trl_ext.memory.files.plan import write_plan
    from trl_ext.memory.models.find import find_shape
    from trl_ext.memory.planner.planner import Plan

    monkeypatch.delenv(VARIABLE, raising=False)
    job = Job("reward", method="lora", expandable_segments=expandable)
    write_plan(Plan(estimate(job, find_shape("8B"), Hardware(1, find_card("H200"))), ()), tmp_path)
    assert segments_expand(str(tmp_path / "recipe.yaml")) is expandable


@pytest.mark.slow
def test_a_plans_recipe_is_read_from_any_folder_for_the_prompts_that_it_was_made_for(tmp_path):
    from trl_ext.memory import plan, write_plan
    from trl_ext.twin.from_recipe import recipe_of

    question = dict(max_prompt_length=700, zero_stage=2)
    write_plan(plan("grpo", "Qwen/Qwen2.5-0.5B", "2xA40", **question).best, tmp_path / "plan")
    recipe = recipe_of(str(tmp_path / "plan" / "recipe.yaml"), 2, None, None, None, None)
    assert recipe.deepspeed["zero_optimization"]["stage"] == 2 and recipe.has_launch
    assert recipe.prompt_tokens == 700
    assert "memory" not in recipe.given  # whose settings stand in the recipe

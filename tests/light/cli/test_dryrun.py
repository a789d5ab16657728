"""`trl-ext dryrun` answers for its help without torch; what it prints of reserved memory is allocated and a share."""

import subprocess
import sys

import pytest

from trl_ext.cli.dryrun.command import reserved_gib, segments_expand, verdict, verdict_of
from trl_ext.cli.main import main
from trl_ext.memory import Plan, estimate, find_shape, parse_gpus, plan, write_plan
from trl_ext.memory.formulas.peak import slack_share
from trl_ext.memory.job import Job


@pytest.mark.slow
def test_importing_it_imports_no_torch():
    code = "import sys, trl_ext.twin, trl_ext.cli.dryrun.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Reserved ---------------------------------------------------------------------------------------------------------


def answer_of(usable_gib, expandable=False, vllm_gib=0.0, job=None, **phases_gib):
    """What the command answers of reserved memory."""
    own, other = (reserved_gib(phases_gib, vllm_gib, job, policy) for policy in (expandable, not expandable))
    beside = {"other_policy": verdict_of(other, usable_gib, not expandable), "peak_gib": max(phases_gib.values())}
    said = {"usable_gib": usable_gib, "seconds": 0.0, "formula_gib": None}
    return {**verdict_of(own, usable_gib, expandable), **beside, **said, "phases": own}


def test_reserved_is_allocated_and_the_share_of_the_policy_or_a_tenth_of_the_worst_phase():
    answer = answer_of(20, job=Job("reward", zero_stage=2), update=10.0, step=8.0)
    shares = {expands: slack_share(Job("reward", zero_stage=2, expandable_segments=expands)) for expands in (0, 1)}
    assert answer["phases"] == pytest.approx({"update": 10 * (1 + shares[0]), "step": 8 * (1 + shares[0])})
    assert answer["other_policy"]["reserved_gib"] == pytest.approx(10 * (1 + shares[1]))
    assert answer_of(40, update=6.0, generate=30.0)["reserved_gib"] == pytest.approx(33)
    assert not answer_of(32, update=6.0, generate=30.0)["fits"]
    assert answer_of(20, vllm_gib=4.0, update=14.0)["reserved_gib"] == pytest.approx(15)  # no slack of vLLM's share


def test_the_verdict_names_both_numbers_of_the_policy_of_the_other_one_and_of_the_formulas():
    sentence = verdict(answer_of(21.4, job=Job("reward", zero_stage=2), update=18.0))
    assert sentence.startswith(
        "does not fit: 18.0 GiB allocated at the peak, 21.6 reserved (estimated) with native segm"
    )
    assert sentence.endswith("With expandable_segments:True 19.4 would be reserved, which fits.")
    # A policy that differs by little is not mentioned.
    assert "would" not in verdict(answer_of(40, job=Job("reward", method="lora"), update=20.0))
    sentence = verdict({**answer_of(40, update=6.0), "formula_gib": 6.2, "formula_with_slack_gib": 6.5})
    assert "6.0 GiB allocated at the peak" in sentence and "on a card with 40.0 GiB usable." in sentence
    assert sentence.endswith("By the formulas of `trl-ext check` and `plan`: 6.2 GiB, 6.5 with slack.")


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


@pytest.mark.slow
def test_a_launch_of_fsdp_is_answered_by_its_formulas(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nconfig_file: fsdp2\nbeta: 0.0\n")
    assert main(["dryrun", str(tmp_path / "recipe.yaml"), "--gpus", "2xA100-40GB"]) == 0
    out = capsys.readouterr().out
    assert "on 2xA100-40GB, FSDP2, rank 0" in " ".join(out.split())
    assert "FSDP2: the twin runs DeepSpeed's engine and DDP" in out


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


def test_a_recipe_beside_its_plan_runs_as_the_plan_launches_it(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for expandable in (False, True):
        job = Job("reward", method="lora", expandable_segments=expandable)
        write_plan(Plan(estimate(job, find_shape("8B"), parse_gpus("1xH200"))), tmp_path)
        assert segments_expand(str(tmp_path / "recipe.yaml")) is expandable


@pytest.mark.slow
def test_a_plans_recipe_is_read_from_any_folder_for_the_prompts_that_it_was_made_for(tmp_path):
    from trl_ext.twin.from_recipe import recipe_of

    question = dict(max_prompt_length=700, zero_stage=2)
    write_plan(plan("grpo", "Qwen/Qwen2.5-0.5B", "2xA40", **question).best, tmp_path / "plan")
    recipe = recipe_of(str(tmp_path / "plan" / "recipe.yaml"), 2, None, None, None, None)
    assert recipe.deepspeed["zero_optimization"]["stage"] == 2 and recipe.has_launch
    assert recipe.prompt_tokens == 700
    assert "memory" not in recipe.given  # whose settings stand in the recipe

"""The benchmarks run: on shapes so small that their figures say nothing."""

import json
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from benchmarks.quickstart import assets
from tests import recipes
from tests.conftest import ROOT


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a script of the benchmarks in this process, with other constants; returns what it wrote."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(name, *words, **changes):
        script = import_module(name)
        for attribute, value in changes.items():
            monkeypatch.setattr(script, attribute, value)
        path = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--output", str(path)])
        script.main()
        return json.loads(path.read_text())

    return run


def test_planning(run):
    (result,) = run("planning", "--tiny", "--rounds", "1")["results"]
    assert result["forwards"] > 1 and set(result["seconds"]) == {"unpad", "plan", "lay_out"}


@pytest.mark.nightly
def test_forks(run):
    tree = import_module("forks").Shape("tree", prompt=20, turn=20, depth=2)
    whole, cut = run("forks", "--layers", "1", "--width", "192", SHAPES=(tree, replace(tree, budget=110)))["results"]
    assert whole["tokens"] <= whole["unique_tokens"] + 6 < cut["tokens"] < cut["alone_tokens"]


def test_async_trees(run):
    shape = import_module("async_trees").Shape("tiny", 40, 4, 4)
    found = run("async_trees", "--rounds", "1", SHAPES=(shape,))["results"]
    assert [one["dtype"] for one in found] == ["float32", "bfloat16"]
    assert all(one["shared_bytes"] < one["gathered_bytes"] / 3 for one in found) and found[0]["difference"] < 1e-5


def test_balance(run):
    (result,) = run("balance", "--steps", "2", SIGMAS=(0.8,), GROUPS=(16,))["results"]
    assert 1 <= result["median"] <= result["worst"] < result["unplanned"]
    assert result["over_tokens"] >= 1


def test_curriculum(run):
    script = import_module("curriculum")
    found = run("curriculum", "--seeds", "1", "--steps", "5", TAUGHT_STEPS=5, SCORES=(1.0,))
    assert [one["curriculum"] for one in found["runs"]] == ["uniform", '{"target": 0.5}']
    assert all(list(one["held_out"]) == ["0"] and set(one["steps"]) == {"1.0"} for one in found["runs"])
    assert script.steps_to(0.5, {0: 0.1, 5: 0.4, 10: 0.6}) == 7.5 and script.steps_to(0.7, {0: 0.1, 5: 0.4}) is None


@pytest.mark.nightly  # it prepares the quickstart's model
def test_generation(run):
    case = replace(import_module("generation").CASES[0], prompt_tokens=9, lengths=(2, 5, 3, 9) * 8)
    (result,) = run("generation", "--layers", "1", "--rounds", "1", CASES=(case,))["results"].values()
    assert 0 < result["trl_ext"] and 0 < result["trl"]


@pytest.mark.parametrize("trainer", ["grpo", "ppo", "reward"])
def test_activations(trainer, run):
    small = replace(import_module("activations").SHAPE, prompt=5, mean=6, longest=6)
    whole, part = run("activations", "--layers", "1", "--trainers", trainer, PARTS=(1, 4), SHAPE=small)["results"]
    assert whole["forwards"] == 1 and whole["ratio"] < whole["asked"]
    assert part["forwards"] > 1 and part["row_mib"] < whole["row_mib"]


def test_sequence_parallel(monkeypatch):
    """As one process counts; more are started by the script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = import_module("sequence_parallel")
    monkeypatch.setattr(script, "SHAPE", replace(script.SHAPE, prompt=5, mean=6, longest=6))
    held, forwards = script.step("reward", True, layers=1, processes=1)
    assert held > 0 and forwards == 1


def test_images(run):
    small = ("--tokens_a_side", "2", "--layers", "1", "--vision_layers", "1", "--width", "192", "--mean", "4")
    (result,) = run("images", *small, "--rounds", "1")["results"]
    assert (result["image_tokens"], result["ours_patches"], result["trl_patches"]) == (4, 16, 128)


def test_grpo_update(run):
    shape = replace(next(iter(import_module("grpo_update").SHAPES)), prompt=8, mean=8, longest=12, groups=2)
    (result,) = run("grpo_update", "--layers", "1", "--width", "192", "--rounds", "1", SHAPES={shape: 1.0})["results"]
    assert result["trl_tokens"] > result["ours_tokens"] > 0
    assert result["extra_ratio"] > 0 and result["extra_token_ratio"] >= 1


@pytest.mark.nightly
def test_story(run, monkeypatch, tmp_path):
    recipes.save(tmp_path / "model")
    recipes.write_rows(tmp_path / "data", [row | {"answer": "3"} for row in recipes.PROMPTS] * 8)
    monkeypatch.setattr(assets, "prepare", lambda: tmp_path)
    found = run("story", "--max_steps", "1", "--eval_steps", "1", "--bf16", "false")["runs"]
    assert [one["name"] for one in found] == [one.name for one in import_module("story").STORY]
    assert all(0 <= one["held_out_after"] <= 1 and one["headline"] and one["warnings"] for one in found)


def test_the_story_refuses_words_for_a_run_that_is_there(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/report.html").touch()
    with pytest.raises(SystemExit, match="has a run, which --seed 3 would not change"):
        import_module("benchmarks.story").train({}, tmp_path / "0", tmp_path, ["--seed", "3"])

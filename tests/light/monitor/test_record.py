"""The record of a run is whole or refused, and takes nobody else's file."""

import json

import pytest

from trl_ext.errors import DataError
from trl_ext.monitor.record import MARK, read_record, write_record
from trl_ext.rewards import RuleSet

RECIPE = {
    "model_name_or_path": "org/model",
    "dataset_name": "data",
    "learning_rate": 1e-5,
    "use_peft": True,
    "beta": 0.0,
}
VERSIONS = {
    "trainer": "grpo",
    "started": "2026-11-22T18:00:00+00:00",
    "num_processes": 2,
    "cards": ["H200", "H200"],
    "packages": {"trl_ext": "0.1.0", "trl": "1.16.0"},
}
RULES = {"rules": [{"rule": "answer", "gold": "answer", "kind": "number"}], "clip": [-1, 1]}


def test_what_was_written_is_read(tmp_path):
    write_record(tmp_path, RECIPE, VERSIONS, RULES, {"schema": 1}, recipe_notes="Launched with:\n  trl-ext grpo")
    record = read_record(tmp_path)
    assert (record.recipe, record.versions, record.rules, record.plan) == (RECIPE, VERSIONS, RULES, {"schema": 1})
    assert (record.trainer, record.model, record.dataset) == ("grpo", "org/model", "data")
    assert (tmp_path / "recipe.yaml").read_text().startswith(f"{MARK}\n# Launched with:\n#   trl-ext grpo\nmodel_name")
    assert RuleSet.from_yaml(tmp_path / "rules.yaml") == RuleSet.from_dict(RULES)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "rules.yaml", "versions.json", "plan.json"}


def test_a_mixture_names_its_parts_and_a_checkpoint_has_the_record_of_its_run(tmp_path):
    write_record(tmp_path, RECIPE, VERSIONS)
    (tmp_path / "checkpoint-20").mkdir()
    assert read_record(tmp_path / "checkpoint-20").model == "org/model"
    write_record(tmp_path, {"datasets": [{"path": "org/a"}, {"path": "org/b"}]}, VERSIONS)
    assert read_record(tmp_path).dataset == "org/a, org/b" and read_record(tmp_path).model is None


def test_settings_are_text_for_a_person(tmp_path):
    write_record(tmp_path, RECIPE | {"lora_target_modules": ["q", "v"], "rules": RULES}, VERSIONS, RULES)
    settings = read_record(tmp_path).settings()
    assert settings["use_peft"] == "yes" and settings["lora_target_modules"] == '["q", "v"]'
    assert "rules" not in settings and read_record(tmp_path).cards == "2 x H200"


def test_a_new_run_leaves_nothing_of_an_earlier_one(tmp_path):
    write_record(tmp_path, RECIPE, VERSIONS, RULES, {"schema": 1})
    write_record(tmp_path, RECIPE, VERSIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "versions.json"}


def test_a_users_own_recipe_is_kept(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# mine\nseed: 1\n")
    write_record(tmp_path, RECIPE, VERSIONS)
    write_record(tmp_path, RECIPE, VERSIONS)
    assert (tmp_path / "recipe.given.yaml").read_text() == "# mine\nseed: 1\n"
    assert read_record(tmp_path).recipe == RECIPE


def test_rules_that_no_file_can_hold_are_notes(tmp_path):
    write_record(tmp_path, RECIPE, VERSIONS, rules_notes="my_reward, a function")
    assert (tmp_path / "rules.yaml").read_text() == f"{MARK}\n# my_reward, a function\n"
    assert read_record(tmp_path).rules is None


def test_a_folder_without_a_record_has_none_and_half_of_one_is_one_sentence(tmp_path):
    assert read_record(tmp_path) is None
    write_record(tmp_path, RECIPE, VERSIONS)
    (tmp_path / "versions.json").unlink()
    with pytest.raises(DataError, match=r"has no versions\.json: its run ended while it was beginning"):
        read_record(tmp_path)


def test_a_damaged_record_is_one_sentence(tmp_path, subtests):
    recipes = ["a: [1", "a: !!python/name:os.system 1", "just words", ""]
    damages = [*(("recipe.yaml", text) for text in recipes), ("rules.yaml", "- 1"), ("plan.json", "[]")]
    for name, content in [*damages, ("versions.json", '{"trainer": '), ("versions.json", "{}")]:
        write_record(tmp_path, RECIPE, VERSIONS, RULES, {"schema": 1})
        (tmp_path / name).write_text(content)
        with subtests.test(name, content=content), pytest.raises(DataError, match=rf"{name} is damaged: ") as caught:
            read_record(tmp_path)
        assert "\n" not in str(caught.value)


def test_text_of_any_kind_survives(tmp_path):
    recipe = {"system_prompt": "¿Qué? 数学\n# no comment: here\t\x85\u2028 <think>", "eos_token": "no"}
    write_record(tmp_path, recipe, VERSIONS | {"launch": "é"})
    assert read_record(tmp_path).recipe == recipe
    assert json.loads((tmp_path / "versions.json").read_text())["launch"] == "é"

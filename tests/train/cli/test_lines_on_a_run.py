"""Lines that the pages print, in a folder with rules of its own, on the table that a run there has written."""

import sys

import pytest

from tests import recipes, tiny
from trl_ext.cli.main import main
from trl_ext.scripts import grpo

RULES = """\
def shouts(row):
    return float(row.text.isupper())
"""
FUNCTION = "rules_of_this_folder.shouts"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with rules, rows and a recipe, as a user has it: Python does not look for modules there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, FUNCTION.partition(".")[0], raising=False)
    (tmp_path / "rules_of_this_folder.py").write_text(RULES)
    recipes.save(tmp_path / "model")
    rows = [{"prompt": tiny.words(i), "answer": tiny.words(i), "values": [i, 7]} for i in range(3, 11)]
    recipes.write_rows(tmp_path / "rows.jsonl", rows)
    own = dict(num_generations=4, max_completion_length=4, max_steps=1, log_completions=True, output_dir="out")
    rules = [{"rule": "call", "function": FUNCTION, "weight": 0.1}, *recipes.RULES]
    rules += [{"rule": "answer", "name": "list", "gold": "values", "kind": "number", "weight": 0.1}]
    where = dict(model_name_or_path="model", dataset_name="rows.jsonl")
    recipes.recipe(tmp_path, **recipes.SMALL | own | where | dict(rules=rules))
    return tmp_path


def test_rules_of_the_working_folder_are_found_and_a_table_of_the_run_is_explained(folder, capsys):
    assert main(["check", "recipe.yaml", "--trainer", "grpo"]) == 0
    grpo.main(["--config", "recipe.yaml"])
    capsys.readouterr()
    assert main(["score", "explain", "out/rules.yaml", "out/completions/completions_00001.parquet", "--row", "1"]) == 0
    printed = capsys.readouterr().out
    assert "shouts" in printed and "list" in printed
    assert "total in the log" in printed and "The log differs" not in printed
    assert "gold_invalid" not in printed and "values=[" in printed

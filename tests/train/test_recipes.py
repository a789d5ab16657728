"""Every shipped recipe is one that its script accepts."""

import re
from importlib import import_module

import pytest

from trl_ext import resources
from trl_ext.cli.main import SCRIPTS
from trl_ext.cli.recipes import shipped_recipes
from trl_ext.scripts.rewards import build_rules

MODULES = {recipe.name: SCRIPTS[recipe.trainer].module for recipe in shipped_recipes()}
PATHS = {path.stem: path for path in resources.recipes()}


def parse(name, path, output_dir):
    argv = ["--config", str(path), "--output_dir", str(output_dir), "--bf16", "false"]
    return import_module(MODULES[name]).make_parser().parse(argv)


@pytest.mark.parametrize("name", PATHS)
def test_every_shipped_recipe_parses_and_its_rules_build(name, tmp_path):
    script_args, *_ = parse(name, PATHS[name], tmp_path)
    assert script_args.rules is None or build_rules(script_args.rules).columns


def test_what_the_reward_recipe_suggests_in_comments_parses(tmp_path):
    # Lines such as `# use_peft: true` and the list below `# rules:`.
    text = re.sub(r"^# (?=\w+: *(true|[\d.e-]+|\[.*\])$|rules:$|  - \{)", "", PATHS["reward"].read_text(), flags=re.M)
    text = text.replace("\nlearning_rate: 1.0e-5", "")
    (tmp_path / "recipe.yaml").write_text(text)
    script_args, training_args, model_args, _ = parse("reward", tmp_path / "recipe.yaml", tmp_path)
    assert script_args.margin_from_rules and build_rules(script_args.rules).columns
    assert (model_args.use_peft, model_args.lora_target_modules, training_args.learning_rate) == (
        True,
        "all-linear",
        1e-4,
    )

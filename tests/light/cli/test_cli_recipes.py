"""What is shipped is listed, copied and found by its name."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_ext import resources
from trl_ext.cli.main import SCRIPTS, main, shipped_recipes

NAMES = [path.stem for path in resources.recipes()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("recipe", shipped_recipes(), ids=lambda recipe: recipe.name)
def test_the_head_of_a_recipe_says_for_whom_it_is_and_how_to_launch_it(recipe):
    assert recipe.task in ("GRPO", "PPO", "Reward model") and recipe.machine and recipe.purpose.endswith(".")
    assert recipe.trainer in SCRIPTS
    assert f"--config {recipe.name}" in recipe.launch and "--num_processes" in recipe.launch
    settings = yaml.safe_load(recipe.path.read_text())
    given = [word.removeprefix("--") for word in shlex.split(recipe.launch) if word.startswith("--")]
    for key in ("model_name_or_path", "dataset_name", "output_dir"):
        assert (key in settings) != (key in given), f"{key} stands once, in the recipe or behind it"


def test_all_recipes_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    for recipe in shipped_recipes():
        assert f"{recipe.name} " in text and recipe.machine in text and recipe.purpose[:40] in text


def test_a_recipe_is_copied_with_the_launch_line_of_the_copy_and_never_overwrites(here, capsys):
    assert main(["recipes", "reward"]) == 0
    assert (here / "reward.yaml").read_bytes() == resources.recipe("reward").read_bytes()
    assert "--config reward.yaml " in capsys.readouterr().out
    (here / "reward.yaml").write_text("mine")
    assert refused(["recipes", "reward"], capsys).startswith("error: There is a reward.yaml here already.")
    assert (here / "reward.yaml").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_a_sentence(here, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert refused(["recipes", "reward"], capsys) == (
        "error: reward.yaml cannot be written here: Permission denied. Go to another folder."
    )


@pytest.mark.parametrize("command", ["recipes", "launch-file"])
def test_an_unknown_name_is_answered_with_the_nearest(command, here, capsys):
    name, nearest = {"recipes": ("rewrad", "reward"), "launch-file": ("zero-3", "zero3")}[command]
    assert refused([command, name], capsys).endswith(f"the nearest is '{nearest}'.")
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", resources.accelerate_configs(), ids=lambda path: path.stem)
def test_a_launch_file_is_found_by_its_name(path, capsys):
    assert main(["launch-file", path.stem]) == 0
    assert Path(capsys.readouterr().out.removesuffix("\n")) == path


def test_a_name_in_json_is_deepspeeds_file(capsys):
    assert main(["launch-file", "zero3_hpz.json"]) == 0
    assert Path(capsys.readouterr().out.strip()) == resources.deepspeed_config("zero3_hpz")


def test_nothing_heavy_is_imported(here):
    code = (
        "import sys; from trl_ext.cli.main import main\n"
        "for argv in (['recipes', '--help'], ['launch-file', 'zero3'], ['recipes', 'reward']):\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "print([m for m in ('torch', 'trl', 'transformers', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"

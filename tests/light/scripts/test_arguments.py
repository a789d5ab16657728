"""A misspelt key, a wrong value or a broken recipe stops the run, names its line and says what was meant."""

import os
from dataclasses import dataclass, field
from enum import Enum

import pytest

from trl_ext.errors import ConfigError
from trl_ext.scripts.arguments import StrictParser, split_config_flag
from trl_ext.scripts.recipe import launch_file, paths_beside


class When(Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Source:
    path: str
    split: str = "train"


@dataclass
class Data:
    dataset_name: str | None = None
    reward_funcs: list[str] | None = None
    rules: list | str | dict | None = None
    datasets: list[Source] = field(default_factory=list)


@dataclass
class Generation:
    use_vllm: bool = False
    vllm_mode: str = "server"


@dataclass
class Training:
    learning_rate: float = 1e-6
    max_steps: int = -1
    packing: bool | None = None
    eval_strategy: When | str = "no"
    eval_steps: float | None = None
    lr_scheduler_kwargs: dict | str | None = None

    def __post_init__(self):
        if self.max_steps == 13:
            raise ValueError("max_steps must not be 13")


def parse(*argv):
    return StrictParser((Data, Training)).parse(argv)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write recipe.yaml into the working directory and parse it."""
    monkeypatch.chdir(tmp_path)

    def write_and_parse(text, *argv):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return parse("--config", "recipe.yaml", *argv)

    return write_and_parse


def message(function, *args):
    with pytest.raises(ConfigError) as error:
        function(*args)
    return str(error.value)


def test_flags_with_hyphens_are_given_as_those_with_underscores_are():
    words = ["--dataset-name", "my-data", "--learning-rate=1e-5", "--eval-steps", "-1", "--packing", "false"]
    parser = StrictParser((Data, Training))
    data, training = parser.parse(words)
    assert (data.dataset_name, training.learning_rate, training.eval_steps, training.packing) == (
        "my-data",
        1e-5,
        -1,
        False,
    )
    assert parser.given_values(words) == {
        "dataset_name": "my-data",
        "learning_rate": 1e-5,
        "eval_steps": -1,
        "packing": False,
    }


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_defaults(recipe):
    data, training = recipe("learning_rate: 3e-5\nmax_steps: 20\nrules: [{answer: {}}]\n", "--max_steps", "3")
    assert (training.learning_rate, training.max_steps, training.eval_steps) == (3e-5, 3, None)
    assert data.rules == [{"answer": {}}]


def test_config_takes_a_path_or_the_name_of_a_shipped_recipe_and_env_sets_environment_variables(recipe, monkeypatch):
    recipe("max_steps: 7")
    assert parse("--config", "recipe.yaml")[1].max_steps == parse("--config=recipe.yaml")[1].max_steps == 7
    words = split_config_flag(["--config", "quickstart"])
    assert words[1].endswith("quickstart.yaml")
    monkeypatch.setenv("TRL_EXT_TEST_ENV", "before")
    recipe("env:\n  TRL_EXT_TEST_ENV: 5\nmax_steps: 2")
    assert os.environ["TRL_EXT_TEST_ENV"] == "5"


@pytest.mark.parametrize("flag", [["--use_vllm", "false"], ["--use_vllm=false"]])
def test_a_flag_that_switches_a_part_off_leaves_out_the_recipes_keys_of_it(tmp_path, flag):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("use_vllm: true\nvllm_mode: colocate\n")
    parser = StrictParser((Generation,))
    (as_written,) = parser.parse(["--config", str(recipe)])
    assert (as_written.use_vllm, as_written.vllm_mode) == (True, "colocate")
    argv = ["--config", str(recipe), *flag]
    (without,) = StrictParser((Generation,)).parse(argv)
    assert (without.use_vllm, without.vllm_mode) == (False, "server")
    assert parser.given_keys(argv) == {"use_vllm"} and parser.given_values(argv) == {"use_vllm": False}


def test_a_launch_file_in_a_recipe_is_no_field_and_is_found_beside_it(recipe, tmp_path):
    assert recipe("config_file: zero2\nmax_steps: 2")[1].max_steps == 2
    path = tmp_path / "mine.yaml"
    for text, named in [
        ("max_steps: 1", None),
        ("config_file: zero2", "zero2"),
        ("config_file: own.yaml", "own.yaml"),
    ]:
        path.write_text(text)
        assert launch_file(path) == named
    (tmp_path / "own.yaml").write_text("distributed_type: 'NO'\n")
    assert launch_file(path) == str(tmp_path / "own.yaml")


SLIPS = {
    "config_file: [zero2]": "1: 'config_file' must be text, not a list.",
    "# a recipe\nmax_steps: 20\nlearnig_rate: 1e-5\n": "3: unknown key 'learnig_rate'. Did you mean 'learning_rate'?",
    "learning-rate: 1e-5": "1: unknown key 'learning-rate'. Did you mean 'learning_rate'?",
    "zzz: 1": "1: unknown key 'zzz'. Remove it, or list the valid keys with --help.",
    "evaluation_strategy: steps": "1: unknown key 'evaluation_strategy'. It is 'eval_strategy' now.",
    "torch_dtype: bfloat16": "1: unknown key 'torch_dtype'. It is 'dtype' in a recipe, and model_init_kwargs="
    "{'dtype': ...} in a program.",
    "max_steps: 2\nnum_processes: 2": "2: unknown key 'num_processes'. It belongs to `accelerate launch`: give "
    "--num_processes on the command line, before the script.",
    "max_steps: 1\nmax_steps: 2": "2: the key 'max_steps' is on line 1 as well. Keep one of the two.",
    "max_steps: twenty": "1: 'max_steps' must be a whole number, not twenty.",
    "max_steps: 2.5": "1: 'max_steps' must be a whole number, not 2.5.",
    "max_steps:": "1: 'max_steps' must be a whole number, not empty.",
    "learning_rate: [1]": "1: 'learning_rate' must be a number, not a list.",
    "packing: maybe": "1: 'packing' must be true or false, not maybe.",
    "eval_strategy: no": "1: 'eval_strategy' must be one of no, steps, not no. YAML reads a bare no as false; write "
    '"no" for the word.',
    "reward_funcs: a.b": "1: 'reward_funcs' must be a list, not a.b. Write [a.b].",
    "datasets:\n  - path: x\n    spilt: train": "3: unknown key 'spilt'. Did you mean 'split'?",
    "env: 3": "1: 'env' must be a mapping of environment variables.",
}


def test_a_recipe_with_a_slip_is_refused_with_its_line(recipe, subtests):
    for text, words in SLIPS.items():
        with subtests.test(text):
            assert message(recipe, text) == f"recipe.yaml, line {words}"
    for text in ("- max_steps", ""):
        assert message(recipe, text) == "The recipe recipe.yaml holds no keys. Write one `key: value` per line."


def test_a_broken_or_missing_recipe_is_a_sentence_and_all_slips_are_reported_together(recipe):
    lines = message(recipe, "max_stepz: 1\npacking: 3\n").splitlines()
    assert [line.split(":")[0] for line in lines] == ["recipe.yaml, line 1", "recipe.yaml, line 2"]
    assert message(recipe, "max_steps: 1\nrules: [a,\n").startswith("recipe.yaml, line 3: this is not valid YAML: ")
    assert message(parse, "--config", "nowhere.yaml").startswith("There is no recipe nowhere.yaml.")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--learnig_rate", "1"], "Unknown flag --learnig_rate. Did you mean --learning_rate?"),
        (["--max_step=1"], "Unknown flag --max_step. Did you mean --max_steps?"),
        (["--no_cuda"], "Unknown flag --no_cuda. It is 'use_cpu' now."),
        (["--dataset-id-or-path=x"], "Unknown flag --dataset_id_or_path. It is 'dataset_name' now."),
        (["--zzz"], "Unknown flag --zzz. List them with --help."),
        (["stray"], "Unexpected 'stray' on the command line. Give values after their flag: --KEY VALUE."),
        (["--max_steps", "ten"], "--max_steps must be a whole number, not 'ten'."),
        (["--packing", "maybe"], "--packing must be true or false, not 'maybe'."),
        (["--max_steps"], "--max_steps: expected one argument."),
        (["--max_steps", "13"], "These settings cannot work: max_steps must not be 13"),
        (["--config"], "--config has no value. Give the path of a YAML recipe after it."),
        (
            ["--config", "a", "--config=b"],
            "--config is given twice. Give one recipe; later flags override single keys.",
        ),
    ],
)
def test_a_command_line_with_a_slip_is_refused(argv, expected):
    assert message(parse, *argv) == expected


def test_what_trl_accepts_is_accepted(recipe):
    for text in ("eval_strategy: 'no'", "max_steps: '7'", "packing: 'yes'", "eval_steps: null"):
        recipe(text)


def test_help_opens_with_the_description_and_lists_every_key(capsys):
    with pytest.raises(SystemExit) as stop:
        StrictParser((Data, Training), "grpo", "Train.\n\nExamples:\n  one").parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: grpo [--config RECIPE.yaml] [--KEY VALUE ...]\n\nTrain.\n\nExamples:\n  one\n")
    assert "--learning_rate" in text


def test_a_plans_files_are_found_beside_the_recipe_from_any_folder(tmp_path, monkeypatch):
    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepspeed.json").write_text("{}")
    keys = {"memory": "plan.json", "deepspeed": "deepspeed.json", "rules": "rules.yaml", "max_steps": 3}
    assert paths_beside("plan/recipe.yaml", keys) == {"memory": str(folder / "plan.json")}
    assert paths_beside("plan/recipe.yaml", {"memory": "plan"}) == {}  # cards and presets are no files


def test_a_flag_beats_the_file_beside_the_recipe(tmp_path):
    @dataclass
    class Planned:
        memory: str | None = None

    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("memory: plan.json\n")
    argv = ["--config", str(tmp_path / "recipe.yaml")]
    (planned,) = StrictParser((Planned,)).parse(argv)
    assert planned.memory == str(tmp_path / "plan.json")
    assert StrictParser((Planned,)).parse([*argv, "--memory", "1xA40"])[0].memory == "1xA40"

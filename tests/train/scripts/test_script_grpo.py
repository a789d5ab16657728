"""`trl_ext.scripts.grpo` trains from a recipe, and refuses what cannot work before it loads anything."""

import json
import os
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset

from tests import recipes
from tests.recipes import RULES
from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.launch import accelerate as launch
from trl_ext.monitor.record import read_log_history, read_record
from trl_ext.monitor.summary import summarize
from trl_ext.scripts import grpo
from trl_ext.scripts.data.dataset import DatasetSource
from trl_ext.scripts.rewards import build_rewards

# Gives the completions of a random model different rewards, so that the loss is not 0.
DIVIDES = {"rule": "pattern", "pattern": "[0-4]$", "mode": "search"}
EVALUATED = dict(eval_strategy="steps", eval_steps=2, eval_on_start=True, eval_temperature=0.0)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model with its tokenizer, and a folder with train.jsonl and test.jsonl."""
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    recipes.write_rows(folder / "data", recipes.PROMPTS)
    return folder


@pytest.fixture
def run(assets, tmp_path):
    settings = dict(max_steps=2, num_generations=2, num_generations_eval=1, max_completion_length=6)
    return recipes.starter(grpo.main, tmp_path, assets, rules=RULES, **settings)


def test_a_recipe_trains_evaluates_saves_and_reports(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    run(log_completions=True, num_completions_to_print=0, **EVALUATED)
    captured = capfd.readouterr()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "report.html"} <= files
    assert {"recipe.yaml", "rules.yaml", "versions.json"} <= files

    summary = summarize(read_log_history(tmp_path / "out"))
    assert summary.num_steps == 2
    held_out = {curve.name: change for curve, change in summary.held_out.items()}
    assert [curve.name for curve in summary.training] == list(held_out) == ["reward", "answer", "length"]
    assert None not in (held_out["length"].before, held_out["length"].after)
    assert 0 < summary.forwarded_tokens < summary.skipped_tokens
    assert {"generate", "score", "update"} <= set(summary.phase_s)

    progress = captured.err
    assert "held-out after step 0  reward " in progress
    assert "step 1/2  reward " in progress and "answer " in progress and "left 0:00" in progress
    assert "{'loss'" not in captured.out + captured.err  # the metrics dictionary of transformers' own callback
    assert "2 steps in" in captured.out
    assert "Advantage" not in captured.out  # the table of completions
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<h3>Best</h3>" in html and "Column answer</span>" in html and " tokens</td>" in html


def first_step(folder):
    """Loss, gradient norm and reward of step 1; the loss alone is 0, as advantages of a group add up to nothing."""
    entry = read_log_history(folder)[0]
    return [entry[key] for key in ("loss", "grad_norm", "reward")]


def test_a_run_is_repeated_from_its_folder(run, assets, tmp_path, monkeypatch):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"rules": [*RULES, DIVIDES], "clip": [-1, 2]}))
    env = {"SOME_API_KEY": "hush", "SOME_WORD": "loud", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr("os.environ", dict(os.environ))
    flags = ["--rules", str(tmp_path / "rules.yaml"), "--seed", "7", "--use_peft", "--lora_r", "4", "--hub_token", "x"]
    flags += ["--lora_target_modules", "all-linear", "--no_share_prompt"]
    run(*flags, rules=None, max_steps=1, prompt_template="{prompt} w3", env=env)
    (tmp_path / "rules.yaml").unlink()
    grpo.main(["--config", str(tmp_path / "out" / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    assert first_step(tmp_path / "again") == first_step(tmp_path / "out")
    assert first_step(tmp_path / "out")[1] > 0

    first, again = (yaml.safe_load((tmp_path / name / "recipe.yaml").read_text()) for name in ("out", "again"))
    assert first | {"output_dir": str(tmp_path / "again")} == again
    assert first["rules"] == {"rules": read_record(tmp_path / "out").rules["rules"], "clip": [-1.0, 2.0]}
    assert (first["seed"], first["lora_r"], first["share_prompt"]) == (7, 4, False)
    assert first["env"] == {"OMP_NUM_THREADS": "1"} and "hub_token" not in first
    head = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "# Left out, as they may be secrets, of env: SOME_API_KEY, SOME_WORD.\n" in head
    card = (tmp_path / "out" / "README.md").read_text()
    assert "None" not in card and f"| base model | {assets / 'model'} |" in card and "trl_ext: " in card
    scored = "| scored by | answer (weight 1), length (weight 0.1), pattern (weight 1) |"
    assert f"| data | {assets / 'data'} |" in card and scored in card


def test_a_run_without_a_seed_records_the_one_it_had(run, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.scripts.training.run", lambda trainer, *rest: trainer._record(is_resumed=False))
    run()
    record = read_record(tmp_path / "out")
    assert record.recipe["seed"] == 42 and record.trainer == "grpo" and record.versions["num_processes"] == 1


def test_true_resumes_from_the_newest_checkpoint(run, tmp_path, capfd):
    run("--max_steps", "1", save_strategy="steps", save_steps=1)
    capfd.readouterr()
    run("--resume_from_checkpoint", "true", save_strategy="steps", save_steps=1)
    progress = capfd.readouterr().err
    assert "step 2/2" in progress and "step 1/2" not in progress
    assert [entry["step"] for entry in read_log_history(tmp_path / "out") if "reward" in entry] == [1, 2]


SLIPS = [
    (dict(rules=None), [], "There is nothing to score completions with."),
    ({}, ["--model_name_or_path", "./nowhere"], "There is no folder ./nowhere."),
    (EVALUATED, ["--dataset_test_split", "held_out"], "There is no held_out.jsonl in "),
    ({}, ["--resume_from_checkpoint", "true"], "There is no checkpoint in "),
    ({}, ["--learnig_rate", "1"], "Unknown flag --learnig_rate. Did you mean --learning_rate?"),
    ({}, ["--num_generations", "3"], "These settings cannot work: "),
]


def test_a_slip_is_one_sentence_before_anything_is_loaded(subtests, run, capsys, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("read the dataset"))
    for changes, argv, sentence in SLIPS:
        with subtests.test(sentence):
            assert f"error: {sentence}" in recipes.stopped(capsys, run, *argv, **changes)
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert "WORLD_SIZE is 0, fewer than one process." in recipes.stopped(capsys, run)


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr(grpo, "build_rewards", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run()


# Data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_one_local_file_is_the_training_split(tmp_path, suffix):
    path = str(tmp_path / f"rows.{suffix}")
    dataset = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    {"jsonl": dataset.to_json, "csv": dataset.to_csv, "parquet": dataset.to_parquet}[suffix](path)
    train, held_out = DatasetSource(path).load()
    assert train["prompt"] == ["a", "b"] and held_out is None


def test_a_folder_gives_the_splits_that_are_asked_for(assets):
    train, held_out = DatasetSource(str(assets / "data"), test_split="test").load()
    assert len(train) == len(held_out) == 16


def test_a_name_and_a_mixture_contradict_each_other():
    with pytest.raises(ConfigError, match="Give one of them"):
        DatasetSource("openai/gsm8k", mixture=object())


# Rewards ----------------------------------------------------------------------------------------------------------


def test_rules_inline_with_clip_and_from_a_file_are_the_same(tmp_path):
    mapping = {"rules": RULES, "clip": [0, 1]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(mapping))
    assert build_rewards(mapping, None) == build_rewards(str(tmp_path / "rules.yaml"), None)
    assert build_rewards(RULES, None)[0].rules == build_rewards(mapping, None)[0].rules


def test_functions_come_by_trls_name_and_by_dotted_path():
    names = ["think_format_reward", "get_soft_overlong_punishment", "json.dumps"]
    asked = SimpleNamespace(rules=RULES, reward_funcs=names, reward_model_name_or_path="some/model")
    rules, model, named, built, dotted = grpo.all_rewards(asked)
    assert rules.columns == ("answer",) and model == "some/model"
    assert named.__name__ == "think_format_reward" and callable(built) and dotted is json.dumps


def test_a_reward_function_that_is_not_there_is_a_sentence():
    for name, sentence in (
        ("acuracy_reward", "Did you mean 'accuracy_reward'?"),
        ("zzz", "Give the dotted path of a function"),
        ("no_such_module.reward", "cannot be imported"),
        ("json.no_such_function", "json has no reward function 'no_such_function'"),
    ):
        with pytest.raises(ConfigError) as error:
            build_rewards(None, [name])
        assert sentence in str(error.value)


# Launch -----------------------------------------------------------------------------------------------------------


def launched(*argv):
    return launch.launch_arguments("trl_ext.scripts.grpo", grpo.make_parser(), argv)


def test_each_program_gets_its_own_arguments():
    script = ["--config", "quickstart", "--max_steps=2"]
    arguments = launched("--num_processes", "2", *script, "--config_file=zero2", "--main-process-port", "0")
    assert (arguments.num_processes, arguments.main_process_port) == (2, 0)
    assert arguments.config_file == str(resources.accelerate_config("zero2"))
    assert (arguments.module, arguments.training_script) == (True, "trl_ext.scripts.grpo")
    assert arguments.training_script_args == ["--config", str(resources.recipe("quickstart")), "--max_steps=2"]


def test_a_recipe_names_its_launch_file_and_a_flag_wins(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("config_file: zero2\n")
    for flags, file in (
        ([], "zero2"),
        (["--config_file", "multi_gpu"], "multi_gpu"),
        (["--multi_gpu"], None),  # says how, too
    ):
        found = launched("--num_processes", "2", "--config", str(recipe), *flags)
        assert found.config_file == (file and str(resources.accelerate_config(file)))
    assert launched("--config", "gsm8k-grpo-8x40gb").config_file == str(resources.accelerate_config("zero2"))
    recipe.write_text("config_file: zero9\n")
    with pytest.raises(ConfigError, match="'zero9' is not in accelerate_configs"):
        launched("--config", str(recipe))


def test_what_both_programs_know_goes_to_the_script():
    arguments = launched("--gradient_accumulation_steps", "4", "--num_processes", "1")
    assert arguments.training_script_args == ["--gradient_accumulation_steps", "4"]


STRAY = "Unexpected 'stray' on the command line. Give values after their flag: --KEY VALUE."
LAUNCH_SLIPS = {
    "--num_processes 0": "--num_processes is 0, fewer than one process. Start at least one.",
    "--num_machines 0": "--num_machines is 0, fewer than one machine. Start at least one.",
    "--num_machines -1": "--num_machines is -1, fewer than one machine. Start at least one.",
    "--num_processes two": "--num_processes: invalid int value: 'two'.",
    "--num_proceses 2": "Unknown flag --num_proceses. Did you mean --num_processes?",
    "--max_stepz 2": "Unknown flag --max_stepz. Did you mean --max_steps?",
    "--multi_gpu stray": STRAY,
    "--config_file no/such.yaml": "There is no accelerate file no/such.yaml. Check --config_file.",
}
LAUNCH_FILES = {
    "a: [": "cannot be read: while parsing a flow node",
    "num_processes: !!python/name:os.system\n": "cannot be read: could not determine a constructor for the tag",
    "- 1\n": "holds no keys.",
    "": "holds no keys.",
}


def test_a_slip_or_a_broken_file_is_refused_before_a_process_starts(tmp_path):
    for words, sentence in LAUNCH_SLIPS.items():
        with pytest.raises(ConfigError) as error:
            launched(*words.split())
        assert str(error.value) == sentence
    file = tmp_path / "launch.yaml"
    for text, sentence in LAUNCH_FILES.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            launched("--config_file", str(file))
        assert f"The accelerate file {file} {sentence}" in str(error.value)
    file.write_text("distributed_type: 'NO'\nnum_processes: two\n")
    with pytest.raises(ConfigError, match=r"accelerate cannot launch this: .*'str' and 'int'"):
        launch.launch("trl_ext.scripts.grpo", grpo.make_parser(), ["--config_file", str(file)])


def test_the_exit_code_of_a_failed_process_is_passed_on(monkeypatch, capsys):
    import subprocess

    import accelerate.commands.launch as accelerate_launch

    def fail(code):
        def launch_command(arguments):
            raise subprocess.CalledProcessError(code, "python")

        monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)
        return launch.launch("trl_ext.scripts.grpo", grpo.make_parser(), ["--num_processes", "1"])

    assert fail(2) == 2 and capsys.readouterr().err == ""  # the process has printed its sentence
    assert fail(-9) == 1 and "exit code -9" in capsys.readouterr().err

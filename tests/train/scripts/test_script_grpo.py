"""`trl_ext.scripts.grpo` trains from a recipe, and refuses what cannot work before it loads anything."""

import json
import os

import pytest
import torch
import yaml
from datasets import Dataset

from tests import tiny
from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.launch import accelerate as launch
from trl_ext.monitor.record import read_record
from trl_ext.monitor.report import read_log_history
from trl_ext.monitor.summary import summarize
from trl_ext.scripts import grpo
from trl_ext.scripts.data.dataset import DatasetSource
from trl_ext.scripts.rewards import build_rewards

torch.set_num_threads(1)

RULES = [
    {"rule": "answer", "gold": "answer", "kind": "exact"},
    {"rule": "length", "high": 4, "slack": 4, "weight": 0.1},
]
# Gives the completions of a random model different rewards, so that the loss is not 0.
DIVIDES = {"rule": "pattern", "pattern": "[0-4]$", "mode": "search"}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model with its tokenizer, and a folder with train.jsonl and test.jsonl."""
    folder = tmp_path_factory.mktemp("assets")
    tiny.model("llama").save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": tiny.words(i, i + 1), "answer": tiny.words(i)} for i in range(3, 19)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def recipe(tmp_path):
    """A recipe for the tiny model; `without` drops keys, other arguments change them."""

    def write(*without, **changes):
        settings = dict(
            rules=RULES,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            num_generations_eval=1,
            per_device_eval_batch_size=8,
            max_completion_length=6,
            use_cpu=True,
            bf16=False,
            eval_strategy="steps",
            eval_steps=2,
            eval_on_start=True,
            eval_temperature=0.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            output_dir=str(tmp_path / "out"),
        )
        settings.update(changes)
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: settings[key] for key in settings if key not in without}))
        return str(path)

    return write


def test_a_recipe_trains_evaluates_saves_and_reports(assets, recipe, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    path = recipe(log_completions=True, num_completions_to_print=0)
    grpo.main(
        ["--config", path, "--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    )
    captured = capfd.readouterr()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "model.safetensors",
        "trainer_state.json",
        "report.html",
        "recipe.yaml",
        "rules.yaml",
        "versions.json",
    } <= files

    log = read_log_history(tmp_path / "out")
    summary = summarize(log)
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


def test_a_run_is_repeated_from_its_folder(assets, recipe, tmp_path, monkeypatch):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"rules": [*RULES, DIVIDES], "clip": [-1, 2]}))
    short = dict(max_steps=1, eval_strategy="no", eval_on_start=False)
    short |= {"prompt_template": "{prompt} w3"}
    path = recipe("rules", **short, env={"SOME_API_KEY": "hush", "SOME_WORD": "loud", "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr("os.environ", dict(os.environ))
    where = ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    flags = ["--rules", str(tmp_path / "rules.yaml"), "--seed", "7", "--use_peft", "--lora_r", "4", "--hub_token", "x"]
    grpo.main(["--config", path, *where, *flags, "--lora_target_modules", "all-linear", "--no_share_prompt"])
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
    assert (
        f"| data | {assets / 'data'} |" in card
        and "| scored by | answer (weight 1), length (weight 0.1), pattern (weight 1) |" in card
    )


def test_a_run_without_a_seed_records_the_one_it_had(assets, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.scripts.training.run", lambda trainer, *rest: trainer._record(is_resumed=False))
    where = ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    grpo.main(["--config", recipe(), *where])
    record = read_record(tmp_path / "out")
    assert record.recipe["seed"] == 42 and record.trainer == "grpo" and record.versions["num_processes"] == 1


def test_true_resumes_from_the_newest_checkpoint(assets, recipe, tmp_path, capfd):
    settings = ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    path = recipe(save_strategy="steps", save_steps=1)
    grpo.main(["--config", path, *settings, "--max_steps", "1"])
    capfd.readouterr()
    grpo.main(["--config", path, *settings, "--resume_from_checkpoint", "true"])
    progress = capfd.readouterr().err
    assert "step 2/2" in progress and "step 1/2" not in progress
    assert [entry["step"] for entry in read_log_history(tmp_path / "out") if "reward" in entry] == [1, 2]


@pytest.mark.parametrize(
    ("without", "argv", "sentence"),
    [
        (["rules"], [], "There is nothing to score completions with."),
        ([], ["--dataset_name", ""], "There is no dataset."),
        ([], ["--dataset_name", "./nowhere"], "There is no file or folder nowhere."),
        ([], ["--dataset_test_split", "held_out"], "There is no held_out.jsonl in "),
        ([], ["--model_name_or_path", "./nowhere"], "There is no folder ./nowhere."),
        ([], ["--rules", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        ([], ["--resume_from_checkpoint", "true"], "There is no checkpoint in "),
        ([], ["--resume_from_checkpoint", "nowhere"], "There is no checkpoint nowhere."),
        ([], ["--learnig_rate", "1"], "Unknown flag --learnig_rate. Did you mean --learning_rate?"),
        ([], ["--num_generations", "3"], "These settings cannot work: "),
        ([], ["--max_tokens_per_forward", "3"], "max_tokens_per_forward=3 cannot hold one completion"),
    ],
)
def test_a_slip_is_one_sentence_before_anything_is_loaded(
    assets, recipe, without, argv, sentence, capsys, monkeypatch
):
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("read the dataset"))
    settings = ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--config", recipe(*without), *settings, *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"error: {sentence}" in error and "Traceback" not in error


def test_fewer_than_one_process_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(SystemExit):
        grpo.main([])
    assert "WORLD_SIZE is 0, fewer than one process." in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(assets, recipe, monkeypatch):
    monkeypatch.setattr(grpo, "build_rewards", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        grpo.main(["--config", recipe(), "--model_name_or_path", str(assets / "model")])


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
    assert build_rewards(mapping, None, None) == build_rewards(str(tmp_path / "rules.yaml"), None, None)
    assert build_rewards(RULES, None, None)[0].rules == build_rewards(mapping, None, None)[0].rules


def test_functions_come_by_trls_name_and_by_dotted_path():
    rules, model, named, built, dotted = build_rewards(
        RULES, ["think_format_reward", "get_soft_overlong_punishment", "json.dumps"], "some/model"
    )
    assert rules.columns == ("answer",) and model == "some/model"
    assert named.__name__ == "think_format_reward" and callable(built) and dotted is json.dumps


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("acuracy_reward", "Did you mean 'accuracy_reward'?"),
        ("zzz", "Give the dotted path of a function"),
        ("no_such_module.reward", "cannot be imported"),
        ("json.no_such_function", "json has no reward function 'no_such_function'"),
    ],
)
def test_a_reward_function_that_is_not_there_is_a_sentence(name, sentence):
    with pytest.raises(ConfigError) as error:
        build_rewards(None, [name], None)
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


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--num_processes", "0"], "--num_processes is 0, fewer than one process. Start at least one."),
        (["--num_processes", "two"], "--num_processes: invalid int value: 'two'."),
        (["--num_proceses", "2"], "Unknown flag --num_proceses. Did you mean --num_processes?"),
        (["--max_stepz", "2"], "Unknown flag --max_stepz. Did you mean --max_steps?"),
        (
            ["--multi_gpu", "stray"],
            "Unexpected 'stray' on the command line. Give values after their flag: --KEY VALUE.",
        ),
        (["--config_file", "no/such.yaml"], "There is no accelerate file no/such.yaml. Check --config_file."),
    ],
)
def test_a_slip_is_refused_before_a_process_starts(argv, sentence):
    with pytest.raises(ConfigError) as error:
        launched(*argv)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "cannot be read: while parsing a flow node"),
        ("num_processes: !!python/name:os.system\n", "cannot be read: could not determine a constructor for the tag"),
        ("- 1\n", "holds no keys."),
        ("", "holds no keys."),
    ],
)
def test_an_accelerate_file_that_is_no_mapping_is_refused(tmp_path, text, sentence):
    (tmp_path / "launch.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        launched("--config_file", str(tmp_path / "launch.yaml"))
    assert f"The accelerate file {tmp_path / 'launch.yaml'} {sentence}" in str(error.value)


def test_what_accelerate_refuses_is_a_sentence(tmp_path):
    (tmp_path / "launch.yaml").write_text("distributed_type: 'NO'\nnum_processes: two\n")
    with pytest.raises(ConfigError, match=r"accelerate cannot launch this: .*'str' and 'int'"):
        launch.launch("trl_ext.scripts.grpo", grpo.make_parser(), ["--config_file", str(tmp_path / "launch.yaml")])


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

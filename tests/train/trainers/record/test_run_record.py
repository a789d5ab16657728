"""A trainer that is constructed in Python leaves a record, a card and a report, and shows one line of progress."""

import json
import subprocess
from itertools import product

import pytest
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.monitor import ProgressLine
from trl_ext.monitor.record import read_record
from trl_ext.rewards.rules.length import Length
from trl_ext.trainers.record.recipe import commit_of

ROWS = Dataset.from_list([{"prompt": tiny.words(i, i + 1)} for i in range(3, 11)])
SIZES = dict(max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=4)
SIZES |= dict(save_strategy="no")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")


class Mine(Length):
    """A rule of this program."""


def my_reward(completions, **kwargs):
    return [0.5] * len(completions)


def trainer(folder, *rewards, config=GRPOConfig, callbacks=None, peft_config=None, **changes):
    args = config(output_dir=str(folder), **{**tiny.QUIET_ON_CPU, **SIZES, **changes})
    options = dict(processing_class=tiny.tokenizer(), callbacks=callbacks, peft_config=peft_config)
    return GRPOTrainer(tiny.model("llama"), list(rewards) or RuleSet([Length(high=4)]), args, ROWS, **options)


def of_two_rules(folder, **changes):
    rules = RuleSet([Length(high=4), Mine(name="mine", high=2, weight=0.5)])
    return trainer(folder, rules, my_reward, peft_config=LORA, learning_rate=1e-4, **changes)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXT_REPORT", "1")
        of_two_rules(folder, hub_token="x", save_strategy="steps", save_steps=1).train()
    return folder


def test_the_recipe_holds_what_was_passed_and_says_what_it_cannot(left):
    record = read_record(left)
    recipe, text = dict(record.recipe), (left / "recipe.yaml").read_text()
    assert recipe.pop("rules")["rules"][0] == {"rule": "length", "high": 4}
    lora = dict(use_peft=True, lora_r=4, lora_alpha=8, lora_target_modules=["k_proj", "q_proj"])
    own = {**tiny.QUIET_ON_CPU, **SIZES, "report_to": [], "save_strategy": "steps", "save_steps": 1}
    assert recipe == own | lora | dict(output_dir=str(left), learning_rate=1e-4, seed=42)
    assert "#   train_dataset: 8 rows, with the columns prompt\n" in text
    assert "#   model: LlamaForCausalLM\n" in text and f"#   reward: {__name__}.my_reward\n" in text


def test_rules_of_the_program_are_named_with_their_settings(left):
    text = (left / "rules.yaml").read_text()
    assert yaml.safe_load(text)["rules"][1] == {"rule": f"{__name__}.Mine", "high": 2, "weight": 0.5}
    assert f"# Scored in addition to rules, or without rules: {__name__}.my_reward.\n" in text


def test_the_recipe_of_a_program_is_one_for_the_script(left, tmp_path, capsys):
    from trl_ext.scripts import grpo

    with pytest.raises(SystemExit):
        grpo.main(["--config", str(left / "recipe.yaml"), "--output_dir", str(tmp_path)])
    assert "error: There is no model. Give --model_name_or_path" in capsys.readouterr().err


def test_versions_say_on_what_it_ran_and_the_report_stands_beside_them(left):
    versions = json.loads((left / "versions.json").read_text())
    assert versions["trainer"] == "grpo" and versions["num_processes"] == 1
    assert next(iter(versions["packages"])) == "trl_ext" and versions["packages"]["trl"] == trl.__version__
    assert "length" in (left / "report.html").read_text()


def test_the_card_never_says_none(left):
    card = (left / "README.md").read_text()
    assert "None" not in card.split("### Framework")[0]
    assert "| base model | built in the program, without a name |" in card
    assert "| data | 8 rows, with the columns prompt |" in card and "| weights trained | LoRA of rank 4 |" in card
    assert f"length (weight 1), mine (weight 0.5); {__name__}.my_reward" in card
    assert "- trl_ext: " in card and "lora_r: 4" in card and "hub_token" not in card


def test_a_resumed_run_keeps_the_record_of_its_beginning(left):
    before = (left / "recipe.yaml").read_bytes(), (left / "versions.json").read_bytes()
    again = of_two_rules(left, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert before == ((left / "recipe.yaml").read_bytes(), (left / "versions.json").read_bytes())


def test_a_plain_config_of_trls_is_recorded_by_what_differs_from_its_defaults(tmp_path):
    trainer(tmp_path, config=trl.GRPOConfig, learning_rate=0.1)._record(is_resumed=False)
    recipe = dict(read_record(tmp_path).recipe)
    assert recipe.pop("rules") and recipe.pop("output_dir") == str(tmp_path)
    # Fields that TRL fills in itself, as `bf16` and `report_to`, say nothing.
    assert recipe == {**SIZES, "use_cpu": True, "learning_rate": 0.1, "seed": 42}


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trl_ext.trainers.record.trainer.write_record", full)
    trainer(tmp_path).train()
    assert read_record(tmp_path) is None


# Progress -----------------------------------------------------------------------------------------------------------


def shown(run):
    callbacks = run.callback_handler.callbacks
    return [type(one).__name__ for one in callbacks if isinstance(one, (ProgressCallback, PrinterCallback))]


def test_there_is_one_line_of_progress_and_no_series_that_says_nothing(tmp_path, capfd):
    run = trainer(tmp_path, logging_steps=1)
    assert shown(run) == ["ProgressLine"]
    run.train()
    own = {key for key in run.state.log_history[0] if key.startswith(("rules/", "rewards/"))}
    rewards = {f"rewards/{name}/{what}" for name in ("rules", "length") for what in ("mean", "std")}
    assert own == rewards | {"rules/length/p95_ms"}
    captured = capfd.readouterr()
    assert "step 1/1  reward " in captured.err and "{'loss'" not in captured.out + captured.err


def test_a_program_ends_on_table_tokens_phases_verdict_and_the_reports_path(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    monkeypatch.setenv("COLUMNS", "400")
    trainer(tmp_path, lambda completions, **_: [float(i % 2) for i in range(len(completions))]).train()
    said = capfd.readouterr().out
    assert said.endswith(f"\nReport: {tmp_path}/report.html\n") and said.count("Report: ") == 1
    assert "\ntokens forwarded: " in said and "as padded batches: " in said and "generate " in said
    assert "in the only logged step: too little to judge\n" in said


@pytest.mark.parametrize("how", ["no report", "no line of progress", "log level"])
def test_who_wants_to_hear_nothing_hears_nothing_at_the_end_either(how, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRL_EXT_REPORT", "0" if how == "no report" else "1")
    before = logging.get_verbosity()
    try:
        run = trainer(tmp_path, **({"log_level": "error"} if how == "log level" else {}))
        if how == "no line of progress":
            run.remove_callback(ProgressLine)
        run.train()
    finally:
        logging.set_verbosity(before)
    assert not capfd.readouterr().out


def test_the_reward_of_the_only_function_is_shown_once(tmp_path, capfd):
    trainer(tmp_path, my_reward, logging_steps=1).train()
    assert "  reward " in (said := capfd.readouterr().err) and "my_reward" not in said


def test_the_table_that_transformers_shows_in_a_notebook_gives_way(tmp_path, monkeypatch):
    class TableOfNotebooks(TrainerCallback):
        """As transformers' own, which is no ProgressCallback."""

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", TableOfNotebooks)
    run = trainer(tmp_path, disable_tqdm=False)
    assert not run.pop_callback(TableOfNotebooks) and shown(run) == ["ProgressLine"]


def test_callbacks_of_the_users_own_choice_are_what_is_shown(tmp_path):
    for callback, disable_tqdm in product((PrinterCallback, ProgressCallback), (True, False)):
        run = trainer(tmp_path, disable_tqdm=disable_tqdm)
        run.remove_callback(callback)
        assert shown(run) == []
    printed = trainer(tmp_path, callbacks=[PrinterCallback()], disable_tqdm=False)
    assert shown(printed) == ["PrinterCallback", "ProgressCallback"]
    assert shown(trainer(tmp_path, callbacks=[ProgressLine()])) == ["ProgressLine"]
    run, mine = trainer(tmp_path), ProgressLine()
    run.add_callback(mine)
    assert [one for one in run.callback_handler.callbacks if isinstance(one, ProgressLine)] == [mine]


# The commit ---------------------------------------------------------------------------------------------------------


def test_the_commit_is_that_of_the_folders_repository(tmp_path):
    def git(*words, cwd=tmp_path / "one"):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "one" / "below").mkdir(parents=True)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    head = git("rev-parse", "HEAD")
    git("worktree", "add", "-q", str(tmp_path / "two"))
    assert commit_of(tmp_path / "one" / "below") == commit_of(tmp_path / "two") == head
    assert commit_of(tmp_path) is None and commit_of(tmp_path / "nothing") is None

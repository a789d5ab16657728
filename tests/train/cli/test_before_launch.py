"""What one process can know is said before many start."""

import json
import os
from contextlib import nullcontext
from functools import cache

import huggingface_hub
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command
from filelock import FileLock

import trl_ext
from trl_ext import resources
from trl_ext.cli import before_launch
from trl_ext.cli.before_launch import check_before_launch
from trl_ext.cli.check.recipe import make_parser
from trl_ext.errors import ConfigError, DataError, SupportError
from trl_ext.launch.accelerate import launch, launch_arguments
from trl_ext.trainers.checkpoints import folder

parser_of = cache(make_parser)
RULES = [{"rule": "length", "high": 4}]
GOOD = dict(model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct", dataset_name="rows.jsonl", use_cpu=True, rules=RULES)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    return tmp_path


def check(*words, trainer="grpo", **changes):
    """Check a launch of a recipe with changes; None takes a key out."""
    settings = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with open("recipe.yaml", "w") as file:
        json.dump(settings, file)  # JSON is YAML
    check_before_launch(f"trl_ext.scripts.{trainer}", parser_of(trainer), ["--config", "recipe.yaml", *words])


def test_what_can_start_passes():
    check()
    check("--num_processes", "4", "--config_file", "multi_gpu")
    check("--packing", "false", "--num_processes=2", "--report_to", "none")


REFUSED = [
    (dict(model_name_or_path=None), [], ConfigError, "There is no model."),
    (dict(model_name_or_path="./nowhere"), [], ConfigError, "There is no folder ./nowhere."),
    (dict(dataset_name=None), [], ConfigError, "There is no dataset."),
    (dict(dataset_name="rows.json"), [], DataError, "There is no file or folder rows.json."),
    (dict(dataset_name="./rows"), [], DataError, "There is no file or folder rows."),
    (dict(eval_strategy="steps"), [], DataError, "rows.jsonl is one file and has no split 'test'."),
    ({}, ["--dataset_name", "/nowhere/rows"], DataError, "There is no file or folder /nowhere/rows."),
    (dict(output_dir="rows.jsonl"), [], ConfigError, "output_dir rows.jsonl cannot be a folder"),
    (dict(resume_from_checkpoint="out/checkpoint-5"), [], ConfigError, "There is no checkpoint out/checkpoint-5."),
    (dict(rules="rules.yaml"), [], ConfigError, "rules.yaml cannot be read"),
    (dict(rules=[{"rule": "lenght"}]), [], ConfigError, "unknown rule 'lenght'. Did you mean 'length'?"),
    (dict(report_to="tensorbord"), [], ConfigError, "report_to is tensorbord, which is no tracker. Did you mean"),
    (dict(report_to=["none", "dvclive"]), [], SupportError, "report_to is dvclive, and its package is not instal"),
    (dict(use_vllm=True), [], SupportError, "use_vllm is set, and vllm is not installed: pip install 'trl_ext[v"),
    (dict(prompt_template="{"), [], ConfigError, "prompt_template: "),
]


def test_what_cannot_start_is_a_sentence(subtests):
    for changes, words, error, sentence in REFUSED:
        with subtests.test(sentence):
            with pytest.raises(error) as raised:
                check(*words, **changes)
            assert sentence in str(raised.value)


def test_a_folder_that_may_not_be_written_is_a_sentence(here, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)  # root may write everywhere
    with pytest.raises(ConfigError, match=f"output_dir out cannot be written: {here} is read-only for you. Give"):
        check(output_dir="out")


def test_a_folder_that_another_run_uses_is_a_sentence(here, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.1)
    (here / "out").mkdir()
    with FileLock(here / "out" / folder.LOCK), pytest.raises(ConfigError, match="out is in use by another run"):
        check(output_dir="out")
    check(output_dir="out")


def test_deepspeed_that_is_not_installed_is_a_sentence(monkeypatch):
    monkeypatch.setattr(before_launch, "find_spec", lambda name: None if name == "deepspeed" else name)
    asked = ((["--config_file", "zero2"], {}), (["--use_deepspeed"], {}), ([], {"deepspeed": "engine.json"}))
    for words, changes in asked:
        with pytest.raises(SupportError, match=r"deepspeed is not installed: pip install 'trl_ext\[deepspeed\]'"):
            check(*words, **changes)


SEVERAL = "--num_processes 8 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --multi_gpu"
CARDS = [
    (0, "--num_processes 2", "2 processes are to start on this machine, and no GPU is visible."),
    (4, "--num_processes 8", "4 GPUs are visible. Start one process for each: --num_processes 4."),
    (4, SEVERAL, None),
    (4, "--num_processes 4", None),
    (0, "--num_processes 1", None),
    (0, "--num_processes 8 --use_cpu true", None),
]


def test_more_processes_than_cards(monkeypatch):
    for cards, words, sentence in CARDS:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda cards=cards: cards > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda cards=cards: cards)
        with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
            check(*words.split(), use_cpu=None)


@pytest.mark.parametrize("words", [(), ("--cpu",)], ids=["", "--cpu"])
def test_several_processes_without_cards_are_started_as_such(words, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    arguments = launch_arguments("trl_ext.scripts.grpo", parser_of("grpo"), ["--num_processes", "2", *words])
    arguments, *_ = _validate_launch_command(arguments)
    assert arguments.num_processes == 2 and arguments.multi_gpu and not arguments.cpu  # accelerate's name for several


def test_a_misspelt_key_is_a_sentence():
    with pytest.raises(ConfigError, match=r"unknown key 'max_step'\. Did you mean 'max_steps'"):
        check(max_step=5)


@pytest.mark.parametrize("path", resources.accelerate_configs(), ids=lambda path: path.stem)
def test_every_shipped_launch_file_passes(path):
    if path.stem.startswith("zero"):
        pytest.importorskip("deepspeed")
    check("--config_file", path.stem, "--num_processes", "2")


def test_accelerate_has_nothing_to_say_of_one_process(caplog, monkeypatch):
    """Nothing was named, so it would tell each start which values it chose; many cards stay its own affair."""
    from accelerate.commands.launch import _validate_launch_command

    for module in ("config.config_args", "launch"):
        monkeypatch.setattr(f"accelerate.commands.{module}.default_config_file", "/nowhere/default_config.yaml")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    check()  # writes the recipe
    arguments = launch_arguments("trl_ext.scripts.grpo", parser_of("grpo"), ["--config", "recipe.yaml"])
    with caplog.at_level("WARNING"):
        _validate_launch_command(arguments)
    assert not caplog.records and arguments.num_processes == 1
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    arguments = launch_arguments("trl_ext.scripts.grpo", parser_of("grpo"), ["--config", "recipe.yaml"])
    assert arguments.num_processes is None


def test_a_run_that_is_ended_while_it_loads_does_not_send_to_an_output_that_has_no_reason(here, monkeypatch, capsys):
    """A batch system or `timeout` ends it before our handler of SIGTERM is there."""
    (here / "loads_for_long.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    monkeypatch.setenv("PYTHONPATH", str(here), prepend=os.pathsep)
    check()  # writes the recipe
    assert launch("loads_for_long", parser_of("grpo"), ["--config", "recipe.yaml", "--cpu"]) == 1
    said = capsys.readouterr().err
    assert "exit code -15; it was ended by SIGTERM before it could save: by `timeout`" in said and "above" not in said


@pytest.fixture
def silent_hub(here, monkeypatch):
    """A hub at a port where nobody listens, and a cache with one model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(here / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (here / "hf/hub/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/abc").mkdir(parents=True)


MISSPELT = "Qwen/Qwen2.5-0.5B-Instuct"
SENTENCE = (
    rf"^The model {MISSPELT} is not on this machine, and http://127\.0\.0\.1:9 does not answer \(.*\)\. "
    r"Did you mean 'Qwen/Qwen2\.5-0\.5B-Instruct'\? Give a folder: elsewhere `hf download .* FOLDER`"
)


def test_a_hub_that_is_silent_is_a_sentence_before_anything_loads(silent_hub, capfd):
    with pytest.raises(ConfigError, match=SENTENCE):
        check(model_name_or_path=MISSPELT)
    assert "Retrying" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["GRPOTrainer", "PPOTrainer", "RewardTrainer"])
def test_a_program_gets_the_same_sentence_from_its_trainer(silent_hub, name, capfd):
    args = getattr(trl_ext, name.replace("Trainer", "Config"))("out", use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=SENTENCE):
        getattr(trl_ext, name)(model=MISSPELT, args=args)
    assert "Retrying" not in capfd.readouterr().err


def test_a_model_of_the_cache_is_taken_from_there_by_the_processes_of_the_run(silent_hub):
    check(model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and huggingface_hub.constants.HF_HUB_OFFLINE

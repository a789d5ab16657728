"""What the README shows, runs: its Python and YAML blocks, and its launch commands up to the first process."""

import re
import runpy
import shlex

import pytest
import torch

from tests import tiny
from tests.conftest import ROOT
from tests.ppo_trainers import classifier
from trl_ext import RuleSet
from trl_ext.cli.launch import launch_arguments
from trl_ext.scripts import grpo, ppo, reward

torch.set_num_threads(1)

SCRIPTS = {"grpo": grpo, "ppo": ppo, "reward": reward}
SECTION = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def read(*names: str) -> list[tuple[str, str]]:
    """Language and text of every block."""
    return SECTION.findall("\n".join((ROOT / name).read_text() for name in names))


BLOCKS = read("README.md", "README_zh.md", "docs/rules.md")
PPO_BLOCKS = read("docs/ppo.md")


def blocks(language: str, of: list[tuple[str, str]] = BLOCKS) -> list[str]:
    return [text for found, text in of if found == language]


def commands(program: str) -> list[str]:
    texts = blocks("") + blocks("", PPO_BLOCKS)
    return [line for text in texts for line in text.splitlines() if line.startswith(program)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


SETTINGS = "use_cpu=True, bf16=False, max_steps=1, report_to='none'"
SAMPLING = f"{SETTINGS}, max_completion_length=4"


def small(code: str, model_folder: str) -> str:
    """The block with a model that needs no download and a run of one step."""
    code = code.replace('"Qwen/Qwen2.5-1.5B-Instruct"', repr(model_folder))
    code = code.replace('RewardConfig("out"', f'RewardConfig("out", {SETTINGS}')
    return re.sub(r'((?:GRPO|PPO)Config\("[\w-]+")', rf"\1, {SAMPLING}", code)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs(number, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(small(blocks("python")[number], model_folder))
    runpy.run_path(str(tmp_path / "block.py"))


def test_the_page_on_ppo_runs_from_top_to_bottom(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classifier().save_pretrained("reward-model")
    tiny.tokenizer().save_pretrained("reward-model")
    (tmp_path / "page.py").write_text(small("\n".join(blocks("python", PPO_BLOCKS)), model_folder))
    runpy.run_path(str(tmp_path / "page.py"))


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_block_is_a_rule_set(text, tmp_path):
    (tmp_path / "rules.yaml").write_text(text)
    assert RuleSet.from_yaml(tmp_path / "rules.yaml").rules


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The files that the commands name, seen from the folder they are run in."""
    for folder in ("accelerate_configs", "deepspeed_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "recipe.yaml").write_text("rules:\n  - {rule: answer}\nbf16: false\n")
    monkeypatch.chdir(tmp_path)


PARSERS = {f"trl_ext.scripts.{script}": module.make_parser for script, module in SCRIPTS.items()}
LAUNCHED = [command for script in SCRIPTS for command in commands(f"trl-ext {script} ")]


@pytest.mark.parametrize("command", LAUNCHED)
def test_cli_command_is_accepted(command, recipe):
    _, name, *options = shlex.split(command)
    module = f"trl_ext.scripts.{name}"
    arguments = launch_arguments(module, PARSERS[module](), options)
    assert arguments.num_processes in (2, 4, 6, 8)
    assert arguments.training_script == module


@pytest.mark.parametrize("command", commands("accelerate launch") + commands("torchrun"))
def test_launch_command_is_accepted_by_launcher_and_script(command, recipe):
    launcher, _, rest = command.partition(" -m ")
    module, _, script = rest.partition(" ")
    assert PARSERS[module]().unknown_arguments(shlex.split(script)) == []
    if launcher.startswith("accelerate"):
        from accelerate.commands.launch import launch_command_parser

        words = [*shlex.split(launcher)[2:], "-m", module]
        assert launch_command_parser().parse_args(words).num_processes in (4, 6, 8)


def test_there_is_something_to_check():
    assert blocks("python") and blocks("yaml")
    assert len(blocks("python", PPO_BLOCKS)) > 3
    assert all(commands(start) for start in [*(f"trl-ext {script} " for script in SCRIPTS), "accelerate launch"])
    assert commands("torchrun")


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_make_commands_exist(name):
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

"""What the README shows, runs: its Python and YAML blocks, and its launch commands up to the first process."""

import re
import runpy
import shlex

import pytest
import torch

from tests import tiny
from tests.conftest import ROOT
from trl_ext import RuleSet
from trl_ext.cli.launch import launch_arguments
from trl_ext.scripts import grpo, reward

torch.set_num_threads(1)

README = "\n".join((ROOT / name).read_text() for name in ("README.md", "README_zh.md", "docs/rules.md"))
SECTION = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(language, text) for language, text in SECTION.findall(README)]


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def commands(program: str) -> list[str]:
    return [line for text in blocks("") for line in text.splitlines() if line.startswith(program)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs(number, model_folder, tmp_path, monkeypatch):
    """As it stands, but for a model that needs no download and a run of one step."""
    code = blocks("python")[number]
    code = code.replace('"Qwen/Qwen2.5-1.5B-Instruct"', repr(model_folder))
    settings = "use_cpu=True, bf16=False, max_steps=1, max_completion_length=4, report_to='none'"
    code = code.replace('GRPOConfig("out")', f'GRPOConfig("out", {settings})')
    code = code.replace(
        'RewardConfig("out")', f'RewardConfig("out", {settings.replace("max_completion_length=4, ", "")})'
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(code)
    runpy.run_path(str(tmp_path / "block.py"))


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


PARSERS = {"trl_ext.scripts.grpo": grpo.make_parser, "trl_ext.scripts.reward": reward.make_parser}


@pytest.mark.parametrize("command", commands("trl-ext grpo") + commands("trl-ext reward"))
def test_cli_command_is_accepted(command, recipe):
    _, name, *options = shlex.split(command)
    module = f"trl_ext.scripts.{name}"
    arguments = launch_arguments(module, PARSERS[module](), options)
    assert arguments.num_processes in (6, 8)
    assert arguments.training_script == module


@pytest.mark.parametrize("command", commands("accelerate launch") + commands("torchrun"))
def test_launch_command_is_accepted_by_launcher_and_script(command, recipe):
    launcher, _, rest = command.partition(" -m ")
    module, _, script = rest.partition(" ")
    assert PARSERS[module]().unknown_arguments(shlex.split(script)) == []
    if launcher.startswith("accelerate"):
        from accelerate.commands.launch import launch_command_parser

        words = [*shlex.split(launcher)[2:], "-m", module]
        assert launch_command_parser().parse_args(words).num_processes in (6, 8)


def test_there_is_something_to_check():
    assert blocks("python") and blocks("yaml")
    assert (
        commands("trl-ext grpo")
        and commands("trl-ext reward")
        and commands("accelerate launch")
        and commands("torchrun")
    )


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_make_commands_exist(name):
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_the_tree_names_every_module():
    tree = next(text for text in blocks("") if "trl_ext/" in text and "├" in text)
    modules = [p.name for p in ROOT.glob("trl_ext/*/*.py") if p.name != "__init__.py"]
    # What is deeper stands in its package's docstring, which another test sees to.
    packages = [f"{p.parent.name}/" for p in ROOT.glob("trl_ext/*/*/__init__.py")]
    assert not [name for name in modules + packages if name not in tree]

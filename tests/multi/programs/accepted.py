"""Ask the installed package whether it takes command lines and recipes: JSON from stdin, what it refuses to stdout.

The input is {"lines": [[word, ...], ...], "recipes": [...]}; the output lists what is refused, with the reason.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from trl_ext import RuleSet
from trl_ext.cli.main import SCRIPTS
from trl_ext.launch import ray_train, split_launcher
from trl_ext.launch.accelerate import launch_arguments
from trl_ext.launch.servers import servers_beside

NOT_OF_A_RECIPE = {"rules", "clip", "limits", "isolate", "on_error", "on_unscored", "normalise"}


def parser_of(module: str):
    return import_module(module).make_parser()


def ask(words: list[str]) -> None:
    """Raise where launcher or script refuse the line."""
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    if words[0] == "trl-ext":
        module = f"trl_ext.scripts.{words[1]}"
        parser = parser_of(module)
        launcher, rest = split_launcher(words[2:])
        rest = ray_train.split(rest)[1] if launcher == "ray" else rest
        _, rest = servers_beside(words[1], parser, rest)
        launch_arguments(module, parser, rest)
        return
    launcher, script = words[: words.index("-m")], words[words.index("-m") + 1 :]
    assert not parser_of(script[0]).unknown_arguments(script[1:])
    if launcher[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        arguments = launch_command_parser().parse_args([*launcher[2:], "-m", script[0]])
        assert Path(arguments.config_file).is_file(), arguments.config_file
    elif launcher[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*launcher[1:], "-m", script[0]])
    else:
        assert launcher == ["python"], launcher


async def no_findings(*args, **options) -> bytes:
    """What LanguageTool's server replies about a text without mistakes."""
    return b'{"matches": []}'


def load(text: str) -> None:
    """Raise where the YAML is neither a rule set nor a recipe of some script."""
    import yaml

    Path("block.yaml").write_text(text)
    keys = set(yaml.safe_load(text))
    from trl_ext.rewards.rules import grammar, relevance

    relevance.encoder = lambda model, device: None  # a model that is downloaded by name
    grammar.fetch = no_findings  # of a server that is started by hand
    if "rules" in keys:
        only_rules = {key: value for key, value in yaml.safe_load(text).items() if key in NOT_OF_A_RECIPE}
        Path("rules_of_block.yaml").write_text(yaml.safe_dump(only_rules))
        assert RuleSet.from_yaml("rules_of_block.yaml").rules
    if keys <= NOT_OF_A_RECIPE:
        return
    refused = []
    for module in (f"trl_ext.scripts.{name}" for name in SCRIPTS):
        try:
            assert not parser_of(module).unknown_arguments(["--config", "block.yaml"])
            return
        except Exception as error:
            refused.append(f"{module}: {error}")
    raise AssertionError("\n".join(refused))


def main() -> None:
    given = json.load(sys.stdin)
    refused = []
    for examine, asked in ((ask, given["lines"]), (load, given["recipes"])):
        for one in asked:
            try:
                examine(one)
            except (Exception, SystemExit) as error:
                refused.append([one, f"{type(error).__name__}: {error}"])
    json.dump(refused, sys.stdout)


if __name__ == "__main__":
    main()

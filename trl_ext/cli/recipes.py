"""`trl-ext recipes` and `trl-ext launch-file`: shipped files, by name.

A recipe's trainer, machine and launch line are read from the comment at its head.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trl_ext import resources
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

_FIRST_LINE = re.compile(r"# (?P<task>.+?) on (?P<machine>[^:]+): (?P<purpose>.+)")
_COMMAND = re.compile(r"^#   (.*)$", re.MULTILINE)

LIST = """\
Shipped recipes: list them, or copy one here to change it.

  trl-ext recipes                       lists them
  trl-ext recipes gsm8k-grpo-1x4090     writes ./gsm8k-grpo-1x4090.yaml, and prints how to launch it

A recipe also runs without a copy: trl-ext grpo --config NAME."""
LAUNCH_FILE = """\
Print the path of a shipped accelerate file, for accelerate's own launcher:

  accelerate launch --num_processes 8 --config_file "$(trl-ext launch-file zero3)" \\
      -m trl_ext.scripts.grpo --config RECIPE

trl-ext grpo, ppo and reward take the name instead of a path: --config_file zero3. Names that end in .json are
DeepSpeed files, for --deepspeed or the recipe's key of that name: trl-ext launch-file zero3_hpz.json"""


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """The comment at the head of a shipped recipe.

    Args:
        name: Value for `--config`.
        path: The recipe's file.
        task: "GRPO", "PPO", "Reward model".
        machine: "1 x RTX 4090 (24 GB)".
        purpose: Model, data and method.
        launch: The command that starts it, with the comment's line breaks.
    """

    name: str
    path: Path
    task: str
    machine: str
    purpose: str
    launch: str

    @property
    def trainer(self) -> str:
        """The command that runs it: grpo, ppo or reward."""
        return self.launch.partition("trl-ext ")[2].split()[0]


def shipped_recipes() -> list[ShippedRecipe]:
    """Read the heads of all shipped recipes, sorted by name."""
    return [read_head(path) for path in resources.recipes()]


def read_head(path: Path) -> ShippedRecipe:
    """Read the head of a shipped recipe."""
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]
    first = _FIRST_LINE.match(head)
    assert first, f"{path.name} does not begin with `# TASK on MACHINE: PURPOSE`"
    return ShippedRecipe(path.stem, path, **first.groupdict(), launch="\n".join(_COMMAND.findall(head)))


def recipes(argv: Sequence[str]) -> int:
    """List the shipped recipes, or copy a recipe, and return the exit code."""
    parser = CommandParser("trl-ext recipes", description=LIST)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to copy (default: list all)")
    name = parser.parse_args(list(argv)).name
    if name is None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("recipe", "task", "machine", "what"):
            table.add_column(title, no_wrap=title == "recipe", overflow="fold")
        for recipe in shipped_recipes():
            table.add_row(recipe.name, recipe.task, recipe.machine, recipe.purpose)
        console = Console(highlight=False, markup=False)
        console.print(table)
        console.print("\ntrl-ext recipes NAME copies one here, and prints how to launch it.", soft_wrap=True)
        return 0
    source = resources.recipe(name)
    try:
        with open(f"{name}.yaml", "x", encoding="utf-8") as copy:
            copy.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise ConfigError(f"There is a {name}.yaml here already. Move it, or go to another folder.") from error
    except OSError as error:
        raise ConfigError(f"{name}.yaml cannot be written here: {error.strerror}. Go to another folder.") from error
    launch = read_head(source).launch.replace(f"--config {name}", f"--config {name}.yaml")
    print(f"written: {name}.yaml\n\nlaunch:\n{launch}")
    return 0


def launch_file(argv: Sequence[str]) -> int:
    """Print the path of a shipped accelerate file, or of a DeepSpeed file by a name that ends in .json."""
    parser = CommandParser("trl-ext launch-file", description=LAUNCH_FILE)
    parser.add_argument("name", metavar="NAME", help=", ".join(path.stem for path in resources.accelerate_configs()))
    name = parser.parse_args(list(argv)).name
    is_engine = name.endswith(".json")
    print(resources.deepspeed_config(name.removesuffix(".json")) if is_engine else resources.accelerate_config(name))
    return 0

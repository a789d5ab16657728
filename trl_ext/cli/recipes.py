"""`trl-ext recipes` and `trl-ext launch-file`: shipped files, by name.

A recipe's trainer, machine and launch line are read from the comment at its head.
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext import resources
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError
from trl_ext.launch.machines import PORT, check_machines, of_slurm

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
DeepSpeed files, for --deepspeed or the recipe's key of that name: trl-ext launch-file zero3_hpz.json

For several machines it writes a copy into this folder and prints its path. Under SLURM's srun the copy gets rank and
address from SLURM:

  trl-ext launch-file zero3 --num_machines 4 --main_process_ip 10.0.0.1 --num_processes 32"""


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
        print_recipes(shipped_recipes())
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


def print_recipes(found: Sequence[ShippedRecipe]) -> None:
    """Print a line for each recipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("recipe", "task", "machine", "what"):
        table.add_column(title, no_wrap=title == "recipe", overflow="fold")
    for recipe in found:
        table.add_row(recipe.name, recipe.task, recipe.machine, recipe.purpose)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print("\ntrl-ext recipes NAME copies one here, and prints how to launch it.", soft_wrap=True)


def launch_file(argv: Sequence[str]) -> int:
    """Print the path of a shipped accelerate file, or of a copy for several machines; return the exit code."""
    parser = CommandParser("trl-ext launch-file", description=LAUNCH_FILE)
    parser.add_argument("name", metavar="NAME", help=", ".join(path.stem for path in resources.accelerate_configs()))
    parser.add_argument(
        "--num_machines", type=int, help="write a copy for this number of machines, and print its path"
    )
    later = "(default: left to accelerate's command line)"
    parser.add_argument("--machine_rank", type=int, help=f"number of this machine, from 0 {later}")
    purpose = f"address at which the other machines reach machine 0 {later}"
    parser.add_argument("--main_process_ip", metavar="ADDRESS", help=purpose)
    purpose = f"free port on machine 0 (default {PORT})"
    parser.add_argument("--main_process_port", type=int, metavar="PORT", help=purpose)
    parser.add_argument("--num_processes", type=int, help=f"processes on all machines together {later}")
    arguments = vars(parser.parse_args(list(argv)))
    name = arguments.pop("name")
    is_engine = name.endswith(".json")
    path = resources.deepspeed_config(name.removesuffix(".json")) if is_engine else resources.accelerate_config(name)
    given = {name: value for name, value in arguments.items() if value is not None}
    if given.get("num_machines", 1) > 1 and "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun
        given = of_slurm(given["num_machines"]) | given
    if is_engine and given:
        raise ConfigError(f"{path.name} is DeepSpeed's, for any number of machines. Leave out --{next(iter(given))}.")
    if not given:
        print(path)
    elif "num_machines" not in given:
        raise ConfigError(f"--{next(iter(given))} is for several machines. Give --num_machines, too.")
    else:
        print(_copy_for_machines(path, given))
    return 0


def _copy_for_machines(path: Path, given: dict[str, Any]) -> Path:
    """Write a shipped accelerate file into the working folder, with the numbers of a run on several machines."""
    import yaml

    num_machines, rank = given["num_machines"], given.get("machine_rank")
    check_machines(
        num_machines,
        0 if rank is None else rank,
        given.get("main_process_ip", "later"),
        given.get("main_process_port"),
        given.get("num_processes"),
    )
    text = path.read_text(encoding="utf-8")
    if yaml.safe_load(text)["distributed_type"] == "NO" and num_machines > 1:
        raise ConfigError(
            f"{path.stem} starts one process alone. Take multi_gpu, zero2 or zero3 for several machines."
        )
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in given]
    lines = [*kept, *(f"{name}: {json.dumps(value)}" for name, value in given.items())]
    copy = Path(f"{path.stem}-{num_machines}-machines{'' if rank is None else f'-rank{rank}'}.yaml")
    # Other machines may write the same file into a shared folder: replace it in one step.
    unfinished = Path(f"{copy}.{socket.gethostname()}.{os.getpid()}")
    unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    unfinished.replace(copy)
    return copy.resolve()

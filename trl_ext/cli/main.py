"""`trl-ext`: a command for each training script, for the shipped files, and for plans, checks, reports and rules.

Heavy libraries are imported only when a command needs them, so that help answers at once. A shipped recipe's trainer,
machine and launch line are read from the comment at its head.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trl_ext import resources
from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError, did_you_mean
from trl_ext.monitor.streams import ignore_failed_writes
from trl_ext.scripts.exit import user_errors

# The training scripts `trl_ext.scripts.NAME`: a line for the list, and arguments for an example.
SCRIPTS = {
    "grpo": ("train with GRPO on rules and reward functions", "--num_processes 1 --config gsm8k-grpo-1x4090"),
    "ppo": ("train with PPO on rules, reward models, or both", "--num_processes 4 --config gsm8k-ppo-4xa40"),
    "reward": ("train a reward model on pairs of answers", "--num_processes 6 --config rm-ultrafeedback-6x4090"),
}

# Other commands: the module with a function of the command's name, imported when the command runs.
COMMANDS = {
    "plan": "trl_ext.cli.plan.command",
    "check": "trl_ext.cli.check.command",
    "doctor": "trl_ext.cli.check.command",
    "report": "trl_ext.cli.report",
    "score": "trl_ext.cli.score.command",
    "recipes": "trl_ext.cli.main",
    "launch-file": "trl_ext.cli.main",
    "evaluate": "trl_ext.cli.after.command",
    "generate": "trl_ext.cli.after.command",
}

HELP = """\
usage: trl-ext COMMAND [arguments]

Trainer extensions for Hugging Face TRL.

commands:
{scripts}
  plan      find settings that fit the cards, before a run
  check     check that a recipe will start and fit: keys, tokenizer, eight rows, rules, memory
  doctor    check this machine: cards, driver, versions, kernels, memory, disks, harmful variables
  report    write the report of a run again, or compare runs in one table
  score     check rules: audit them on data, explain a reward, try known cheats, serve rewards
  recipes   list the shipped recipes, or copy one
  launch-file  print the path of a shipped accelerate file: zero2, zero3, ...
  evaluate  measure how many held-out problems a trained policy solves
  generate  let a trained policy answer the prompts of a file

  trl-ext COMMAND --help    explains a command
  trl-ext --version         prints the version
"""

SCRIPT_HELP = """\
usage: trl-ext {name} [--config RECIPE] [--KEY VALUE ...] [launch arguments]

  trl-ext {name} {example}
  trl-ext {name} --num_processes 8 --config_file zero3 --config RECIPE --model_name_or_path MODEL --output_dir OUT

Takes the arguments of two programs:
  {module:<32}  every key of a recipe; gets an argument that both programs have
  accelerate launch                 --num_processes, --config_file, --main_process_port and so on

  --config        YAML recipe, or the name of a shipped recipe: {recipes}
  --config_file   accelerate file, or the name of a shipped file: zero2, multi_gpu, cpu, ... (default: the recipe's)
  --launcher ray  start workers of Ray Train instead of accelerate's processes: --num_workers, --resources_per_worker,
                  --address, --storage_path, --max_failures, --autoscaling
  --vllm_servers  number of vLLM servers to start on cards of this machine; those cards then do not train. They end
                  with the run. Not for reward (default: none)

All keys:              {module} --help
All launch arguments:  accelerate launch --help
"""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["generate"]:  # whose rows nobody needs without a reader
        ignore_failed_writes()
    if not words or words[0] in ("-h", "--help"):
        scripts = "\n".join(f"  {name:9} {purpose}" for name, (purpose, _) in SCRIPTS.items())
        print(HELP.format(scripts=scripts), end="")
        return 0
    if words[0] == "--version":
        print(f"trl-ext {resources.__version__}")
        return 0
    with user_errors():
        if words[0] in SCRIPTS:
            return launch_script(words[0], words[1:])
        if words[0] not in COMMANDS:
            names = [*SCRIPTS, *COMMANDS]
            hint = did_you_mean(words[0], names) or f"There are: {', '.join(names)}."
            raise ConfigError(f"There is no command '{words[0]}'. {hint}")
        return getattr(import_module(COMMANDS[words[0]]), words[0].replace("-", "_"))(words[1:])


def launch_script(name: str, argv: list[str]) -> int:
    """Launch a training script, or print its help."""
    module = f"trl_ext.scripts.{name}"
    if "-h" in argv or "--help" in argv:
        names = [recipe.name for recipe in shipped_recipes() if recipe.trainer == name]
        example, recipes = SCRIPTS[name][1], ", ".join(names)
        print(SCRIPT_HELP.format(name=name, example=example, recipes=recipes, module=f"python -m {module}"), end="")
        return 0
    from trl_ext.cli.before_launch import check_before_launch
    from trl_ext.launch import LAUNCHERS, split_launcher
    from trl_ext.launch.servers import servers_beside, serving

    launcher, argv = split_launcher(argv)
    parser = import_module(module).make_parser()
    launch, on_ray = import_module(LAUNCHERS[launcher]), launcher == "ray"
    servers, argv = (None, argv) if on_ray else servers_beside(name, parser, argv)
    check_before_launch(module, parser, launch.split(argv)[1] if on_ray else argv, on_ray=on_ray)
    with serving(servers):
        return int(launch.launch(module, parser, argv))


# Shipped files ------------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main())

"""`trl-ext`: one command per script, the report of a finished run, and checks of rules.

Help answers at once: nothing heavy is imported before a command needs it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from trl_ext.errors import ConfigError
from trl_ext.scripts.exit import user_errors
from trl_ext.version import __version__


@dataclass(frozen=True, slots=True)
class Script:
    """A training script that a command launches.

    Args:
        module: What `python -m` runs; it has a function `make_parser`.
        purpose: What the command does, in a line.
        example: Its own arguments in the example of the help.
        recipes: Names of the shipped recipes.
    """

    module: str
    purpose: str
    example: str
    recipes: tuple[str, ...]


SCRIPTS = {
    "grpo": Script(
        module="trl_ext.scripts.grpo",
        purpose="train with GRPO on rules as rewards, on one or many processes",
        example="--config recipe.yaml \\\n"
        "      --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name openai/gsm8k",
        recipes=("quickstart",),
    ),
    "ppo": Script(
        module="trl_ext.scripts.ppo",
        purpose="train with PPO on rules, reward models, or both, on one or many processes",
        example="--config recipe.yaml \\\n"
        "      --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name openai/gsm8k",
        recipes=("ppo", "ppo_reward_model"),
    ),
    "reward": Script(
        module="trl_ext.scripts.reward",
        purpose="train a reward model on pairs of answers, on one or many processes",
        example="--config reward \\\n"
        "      --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/ultrafeedback_binarized",
        recipes=("reward",),
    ),
}

HELP = """\
usage: trl-ext COMMAND [arguments]

Trainer extensions for Hugging Face TRL.

commands:
{scripts}
  plan      settings that fit the cards, before the run
  dryrun    the memory of a recipe, counted on fake tensors: no GPU, no weights
  check     will this recipe start, and does it fit: keys, tokenizer, eight rows, rules, memory
  doctor    look at this machine: cards, driver, versions, kernels, memory, disks, harmful variables
  report    write report.html and reward.png of a finished run again
  score     check rules: audit them on data, explain a reward, try known cheats

  trl-ext COMMAND --help    explains a command
  trl-ext --version         prints the version
"""

SCRIPT_HELP = """\
usage: trl-ext {name} [--config RECIPE] [--KEY VALUE ...] [launch arguments]

  trl-ext {name} --num_processes 8 --config_file zero3 {script.example}

Takes the arguments of two programs and gives each its own:
  {module:<32}  every key of a recipe; an argument that both know goes here
  accelerate launch                 --num_processes, --config_file, --main_process_port and so on

  --config        a YAML recipe, or the name of a shipped one: {recipes}
  --config_file   an accelerate file, or the name of a shipped one: zero2, zero3, multi_gpu, single_gpu, cpu, ...

All keys:              {module} --help
All launch arguments:  accelerate launch --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        scripts = "\n".join(f"  {name:9} {script.purpose}" for name, script in SCRIPTS.items())
        print(HELP.format(scripts=scripts), end="")
        return 0
    if words[0] == "--version":
        print(f"trl-ext {__version__}")
        return 0
    with user_errors():
        return _command(words[0])(words[1:])


def launch_script(name: str, argv: list[str]) -> int:
    """Launch a training script, or explain it."""
    script = SCRIPTS[name]
    if "-h" in argv or "--help" in argv:
        recipes, module = ", ".join(script.recipes), f"python -m {script.module}"
        print(SCRIPT_HELP.format(name=name, script=script, module=module, recipes=recipes), end="")
        return 0
    from trl_ext.cli.launch import launch

    return launch(script.module, import_module(script.module).make_parser(), argv)


def report(argv: list[str]) -> int:
    """Render a run's report again."""
    parser = argparse.ArgumentParser("trl-ext report", description="Write report.html and reward.png of a run again.")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="the run's --output_dir, or one of its checkpoints")
    folder = parser.parse_args(argv).output_dir

    from rich.console import Console

    from trl_ext.monitor.report import read_log_history, read_settings, summary_table, write_report

    Console().print(summary_table(write_report(folder, read_log_history(folder), read_settings(folder))))
    return 0


def plan(argv: list[str]) -> int:
    """Settings that fit the cards, by formulas."""
    from trl_ext.cli.plan.command import plan as run

    return run(argv)


def check(argv: list[str]) -> int:
    """Check a recipe without weights."""
    from trl_ext.cli.check.command import check as run

    return run(argv)


def dryrun(argv: list[str]) -> int:
    """Count a recipe's memory on fake tensors."""
    from trl_ext.cli.dryrun.command import dryrun as run

    return run(argv)


def doctor(argv: list[str]) -> int:
    """Look at this machine."""
    from trl_ext.cli.doctor import doctor as run

    return run(argv)


def score(argv: list[str]) -> int:
    """Check rules without a model."""
    from trl_ext.cli.score.command import score as run

    return run(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    **{name: partial(launch_script, name) for name in SCRIPTS},
    "plan": plan,
    "dryrun": dryrun,
    "check": check,
    "doctor": doctor,
    "report": report,
    "score": score,
}


def _command(name: str) -> Callable[[list[str]], int]:
    from difflib import get_close_matches

    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(COMMANDS)}."
        raise ConfigError(f"There is no command '{name}'. {hint}")
    return COMMANDS[name]


if __name__ == "__main__":
    sys.exit(main())

"""`trl-ext`: one command per script, and the report of a finished run.

Help answers at once: nothing heavy is imported before a command needs it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from trl_ext import __version__
from trl_ext.errors import ConfigError
from trl_ext.scripts.exit import user_errors

HELP = """\
usage: trl-ext COMMAND [arguments]

Trainer extensions for Hugging Face TRL.

commands:
  grpo      train with GRPO on rules as rewards, on one or many processes
  report    write report.html and reward.png of a finished run again

  trl-ext COMMAND --help    explains a command
  trl-ext --version         prints the version
"""

GRPO_HELP = """\
usage: trl-ext grpo [--config RECIPE] [--KEY VALUE ...] [launch arguments]

  trl-ext grpo --num_processes 8 --config_file zero3 --config recipe.yaml \\
      --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name openai/gsm8k

Takes the arguments of two programs and gives each its own:
  python -m trl_ext.scripts.grpo    every key of a recipe; an argument that both know goes here
  accelerate launch                 --num_processes, --config_file, --main_process_port and so on

  --config        a YAML recipe, or the name of a shipped one: quickstart
  --config_file   an accelerate file, or the name of a shipped one: zero2, zero3, multi_gpu, single_gpu, cpu, ...

All keys:              python -m trl_ext.scripts.grpo --help
All launch arguments:  accelerate launch --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        print(f"trl-ext {__version__}")
        return 0
    with user_errors():
        return _command(words[0])(words[1:])


def grpo(argv: list[str]) -> int:
    """Launch trl_ext.scripts.grpo."""
    if "-h" in argv or "--help" in argv:
        print(GRPO_HELP, end="")
        return 0
    from trl_ext.cli.launch import launch
    from trl_ext.scripts.grpo import make_parser

    return launch("trl_ext.scripts.grpo", make_parser(), argv)


def report(argv: list[str]) -> int:
    """Render a run's report again."""
    parser = argparse.ArgumentParser("trl-ext report", description="Write report.html and reward.png of a run again.")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="the run's --output_dir, or one of its checkpoints")
    folder = parser.parse_args(argv).output_dir

    from rich.console import Console

    from trl_ext.monitor.report import read_log_history, read_settings, summary_table, write_report

    Console().print(summary_table(write_report(folder, read_log_history(folder), read_settings(folder))))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {"grpo": grpo, "report": report}


def _command(name: str) -> Callable[[list[str]], int]:
    from difflib import get_close_matches

    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(COMMANDS)}."
        raise ConfigError(f"There is no command '{name}'. {hint}")
    return COMMANDS[name]


if __name__ == "__main__":
    sys.exit(main())

"""Start a script through accelerate's own launcher, with one command line for both.

The script's parser takes what it knows; the rest must be known to `accelerate launch`. Everything is checked before a
process starts, so a typo costs no launch.
"""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.scripts.arguments import StrictParser, argument_problem, option_names, split_config_flag, unknown_argument
from trl_ext.scripts.exit import OUT_OF_MEMORY, USER_ERROR


def launch(module: str, parser: StrictParser, argv: Sequence[str]) -> int:
    """Run `module` under accelerate, wait for it, and return 0 or the exit code of the first process that failed.

    Args:
        module: What `python -m` runs.
        parser: The script's parser.
        argv: Arguments of the script and of `accelerate launch`, in any order.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_arguments(module, parser, argv)
    try:
        launch_command(arguments)
    except ValueError as error:
        # Raised before any process starts: accelerate refuses a combination of launch arguments.
        raise ConfigError(f"accelerate cannot launch this: {error}") from error
    except subprocess.CalledProcessError as error:
        return _report_exit(error.returncode)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        # Processes that lose their neighbour fail, too, and may be noticed in the same moment.
        code = OUT_OF_MEMORY if OUT_OF_MEMORY in codes else error.get_first_failure()[1].exitcode
        return _report_exit(code)
    return 0


def launch_arguments(module: str, parser: StrictParser, argv: Sequence[str]) -> Namespace:
    """Divide a command line: the launcher's own arguments, with the script and its arguments among them.

    Raises:
        ConfigError: An argument is known to neither side, or has a value that cannot work.
    """
    words = split_config_flag(argv)
    rest = parser.unknown_arguments(words)
    launcher = _launcher_parser()
    launch_names = option_names(launcher)
    for word in rest:
        if word.startswith("--") and word.partition("=")[0].removeprefix("--").replace("-", "_") not in launch_names:
            raise unknown_argument(word, [*option_names(parser), *launch_names])
    arguments = launcher.parse_args([*rest, "--module", module, *without(words, rest)])
    if arguments.training_script != module:  # a value without a flag: accelerate takes it for the script
        raise unknown_argument(arguments.training_script, launch_names)
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise ConfigError(f"--num_processes is {arguments.num_processes}, fewer than one process. Start at least one.")
    if arguments.config_file is not None and not Path(arguments.config_file).is_file():
        if Path(arguments.config_file).suffix or Path(arguments.config_file).name != arguments.config_file:
            raise ConfigError(f"There is no accelerate file {arguments.config_file}. Check --config_file.")
        arguments.config_file = str(resources.accelerate_config(arguments.config_file))
    return arguments


def without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Remove `taken`, which occur among `words` in the same order, and return the others."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


def _launcher_parser() -> ArgumentParser:
    """Make accelerate's parser raise its errors as sentences, and return it."""
    from accelerate.commands.launch import launch_command_parser

    def refuse(message: str) -> NoReturn:
        raise argument_problem(message, {})

    parser = launch_command_parser()
    parser.error = refuse
    return parser


def _report_exit(code: int) -> int:
    """Say that a process failed, unless it has already explained a user's mistake; return the exit code."""
    if code == OUT_OF_MEMORY:
        print("\nerror: a process ran out of memory; its message above says what would fit.\n", file=sys.stderr)
    elif code != USER_ERROR:
        print(f"\nerror: a process stopped with exit code {code}; its own output above says why.\n", file=sys.stderr)
    return code if code > 0 else 1

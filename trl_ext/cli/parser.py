"""The parser of all commands: a mistake becomes a sentence with the nearest name, and exit code 2.

argparse would print its usage, and suggests names from Python 3.14 on. Nothing heavy is imported here.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trl_ext.errors import ConfigError, did_you_mean


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, which raises ConfigError for every problem, also in sub-commands.

    Args:
        prog: The command, as in its usage line.
        takes_more: True if flags that this parser does not know are allowed.
        options: Arguments of argparse; abbreviations are off, so that `--max_step` is a typo.
    """

    def __init__(self, prog: str, takes_more: bool = False, **options: Any) -> None:
        plain = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, **{"formatter_class": plain, "allow_abbrev": False, **options})
        self.takes_more = takes_more

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Overrides argparse.ArgumentParser.parse_known_args, which parses sub-commands as well."""
        words = list(sys.argv[1:] if args is None else args)
        if not self.takes_more and self._subparsers is None:  # before argparse reports that --row is missing
            flags = (word for word in words if word.startswith("--") and word != "--")
            self._refuse([word for word in flags if word.partition("=")[0] not in self._option_string_actions])
        found, more = super().parse_known_args(words, namespace)
        if not self.takes_more:
            self._refuse(more)
        return found, more

    def _refuse(self, words: Sequence[str]) -> None:
        if words:
            from trl_ext.scripts.recipe import unknown_argument

            raise unknown_argument(words[0], [flag.removeprefix("--") for flag in self._option_string_actions])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Overrides argparse.ArgumentParser._check_value: names the nearest choice."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        hint = did_you_mean(value, choices) or f"There are: {', '.join(choices)}."
        if not action.option_strings:
            raise ConfigError(f"{self.prog} has no command '{value}'. {hint}")
        raise ConfigError(f"{action.option_strings[0]} cannot be '{value}'. {hint}")

    def error(self, message: str) -> NoReturn:
        """Overrides argparse.ArgumentParser.error, which prints the usage and exits."""
        from trl_ext.scripts.recipe import argument_problem

        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            raise ConfigError(f"{self.prog} needs {missing}. See {self.prog} --help.")
        raise argument_problem(message, {action.dest: action.type for action in self._actions if action.type})

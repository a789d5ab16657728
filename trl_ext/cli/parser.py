"""One parser for all commands: a slip is a sentence with the nearest name, and exit code 2.

argparse prints its usage instead, and suggests names from Python 3.14 on. Help answers at once: nothing heavy is
imported here.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trl_ext.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """argparse's parser whose every complaint is a ConfigError; so are those of its sub-commands.

    Args:
        prog: The command, as in its usage line.
        takes_more: True where flags that this parser does not know are for somebody else.
        options: What argparse takes, but for abbreviations: `--max_step` is a typo, not a short form.
    """

    def __init__(self, prog: str, takes_more: bool = False, **options: Any) -> None:
        plain = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, **{"formatter_class": plain, "allow_abbrev": False, **options})
        self.takes_more = takes_more

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Overrides argparse.ArgumentParser.parse_known_args, which sub-commands go through as well."""
        words = list(sys.argv[1:] if args is None else args)
        if not self.takes_more and self._subparsers is None:  # first: argparse would say that --row is missing
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
        from trl_ext.scripts.recipe import nearest

        choices = [str(choice) for choice in action.choices]
        guess = nearest(str(value), choices)
        hint = f"Did you mean '{guess}'?" if guess else f"There are: {', '.join(choices)}."
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

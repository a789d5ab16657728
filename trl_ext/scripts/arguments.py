"""Strict arguments on top of TRL's parser: command line over recipe over defaults, and nothing is ignored.

TRL's scripts parse with `fail_with_unknown_args=False`, so that a misspelt key trains with a default. Here an unknown
key or flag, a value of another type and a broken file each stop the run with a sentence, under any launcher.
"""

import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from trl import TrlParser

from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.scripts.exit import refusals
from trl_ext.scripts.recipe import (
    LAUNCH_KEY,
    argument_problem,
    field_types,
    option_names,
    paths_beside,
    read_recipe,
    unknown_argument,
)

_CONFIG_FLAG = "--config"
_FLAG = re.compile(r"^--(\w[\w-]*)")
# A flag that is false removes the recipe's keys with this prefix, which would have no effect.
_PARTS = {"use_vllm": "vllm_"}


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """A formatter that shows defaults and keeps the line breaks of the description."""


class StrictParser(TrlParser):
    """A `trl.TrlParser` that raises ConfigError for every problem.

    The fields of `dataclass_types` are the valid keys; `description` opens `--help`.
    """

    def __init__(
        self, dataclass_types: Sequence[type], prog: str | None = None, description: str | None = None
    ) -> None:
        super().__init__(
            dataclass_types,  # type: ignore[arg-type]  # transformers declares a NewType
            prog=prog,
            usage="%(prog)s [--config RECIPE.yaml] [--KEY VALUE ...]",
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,  # `--max_step 5` is a typo, not a short form
        )
        self.types_of = field_types(dataclass_types)
        self._left_out: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        """Overrides argparse.ArgumentParser.error, which prints 300 flags of usage and exits."""
        raise argument_problem(message, self.types_of)

    def parse(self, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Parse `argv` and the recipe of `--config` into one instance per dataclass.

        The recipe's `env:` block sets environment variables, as in TRL.

        Args:
            argv: Arguments without the program's name, `sys.argv[1:]` if None.

        Raises:
            ConfigError: An unknown key or flag, a value of another type, a missing or broken recipe, or settings that
                a dataclass refuses.
        """
        argv = split_config_flag(sys.argv[1:] if argv is None else argv)
        # Comes first: building the dataclasses takes seconds and starts devices.
        if unknown := self.unknown_arguments(argv):
            raise unknown_argument(unknown[0], [*option_names(self), "config"])
        if _CONFIG_FLAG in argv:
            recipe = argv[argv.index(_CONFIG_FLAG) + 1]
            keys = read_recipe(recipe, self.types_of)
            self._left_out = frozenset(keys.keys() - self._read(argv)[1].keys())
            beside = paths_beside(recipe, keys)
            files = (f"--{key}={file}" for key, file in beside.items() if key in self.types_of)
            argv = [*files, *argv]  # later flags win
        try:
            with refusals("These settings cannot work"):  # such as a package that an argument needs
                instances = tuple(self.parse_args_and_config(list(argv)))
        except ConfigError:
            raise
        except ValueError as error:
            # Dataclasses of TRL and transformers refuse contradictions with a ValueError.
            raise ConfigError(f"These settings cannot work: {error}") from error
        given = frozenset(self.given_keys(argv))  # our configs treat given values and defaults differently
        for one in instances:
            if hasattr(one, "given"):
                one.given = given
        return instances

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Overrides trl.TrlParser.set_defaults_with_config: drops the launch file, and casts numbers to text."""
        kwargs.pop(LAUNCH_KEY, None)
        kwargs = {name: value for name, value in kwargs.items() if name not in self._left_out}
        for name, value in kwargs.items():
            hint = self.types_of.get(name)
            if type(value) in (int, float) and {*(get_args(hint) or [hint])} <= {str, type(None)}:
                kwargs[name] = str(value)
        return super().set_defaults_with_config(**kwargs)

    def given_keys(self, argv: Sequence[str]) -> set[str]:
        """Return the fields that the recipe or a flag sets; `--no_packing` counts as `packing`."""
        words, recipe = self._read(argv)
        flags = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        keys = {name if name in self.types_of else name.removeprefix("no_") for name in flags}
        return (keys | recipe.keys()) & self.types_of.keys()

    def given_values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values of `given_keys`, from the recipe and the flags, and the recipe's block `env`."""
        words, recipe = self._read(argv)
        flags, given = vars(self.parse_known_args(words)[0]), self.given_keys(words)
        return recipe | {name: flags[name] for name in self.types_of if name in given}

    def unknown_arguments(self, argv: Sequence[str]) -> list[str]:
        """Check the recipe, and return the words of `argv` that no dataclass knows, in order. Builds no dataclass."""
        return self.parse_known_args(self._read(argv)[0])[1]

    def _read(self, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Return the words without `--config`, and the recipe without keys of parts that a flag switches off."""
        words, recipe = split_config_flag(argv), {}
        if _CONFIG_FLAG in words:
            at = words.index(_CONFIG_FLAG)
            recipe = read_recipe(words[at + 1], self.types_of)
            del words[at : at + 2]
        flags = {word.partition("=")[0] for word in words}
        switches = [name for name in _PARTS if name in self.types_of and f"--{name}" in flags]
        values = vars(self.parse_known_args(words)[0]) if switches else {}
        off = tuple(_PARTS[name] for name in switches if not values[name])
        return words, {key: recipe[key] for key in recipe if not (off and key.startswith(off))}


def split_config_flag(argv: Sequence[str]) -> list[str]:
    """Write `--config=file` as two words, as TRL's parser needs, and a shipped recipe's name as its path.

    Flags with hyphens (`--max-steps`) become the fields' names, by which given flags are compared with the recipe.
    """
    words: list[str] = []
    for word in argv:
        word = _FLAG.sub(lambda flag: f"--{flag[1].replace('-', '_')}", word)
        flag, equals, path = word.partition("=")
        words += [flag, path] if flag == _CONFIG_FLAG and equals else [word]
    if words.count(_CONFIG_FLAG) > 1:
        raise ConfigError("--config is given twice. Give one recipe; later flags override single keys.")
    if _CONFIG_FLAG in words:
        at = words.index(_CONFIG_FLAG) + 1
        if at == len(words) or not words[at]:
            raise ConfigError("--config has no value. Give the path of a YAML recipe after it.")
        if re.fullmatch(r"\w[\w-]*", words[at]) and not Path(words[at]).exists():
            words[at] = str(resources.recipe(words[at]))
    return words

"""Read a YAML recipe strictly: every key must be known, occur once and hold a value of its type.

Under `accelerate launch` TRL's reader ignores a misspelt key, and the run trains with a default. Here all problems of
a file are reported together, each with its line. Command lines get the same sentences.
"""

import dataclasses
import re
import types
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.constructor import SafeConstructor

from trl_ext.errors import ConfigError, did_you_mean
from trl_ext.trainers.settings.former import replacement

# Messages of argparse and transformers for a value of another type.
_WRONG_VALUE = re.compile(
    r"invalid \w+ value: '(?P<other>.*)'|Truthy value expected: got (?P<bool>.*) but .*", re.DOTALL
)
# The spellings that argparse turns into a bool for TRL; YAML quotes make them strings.
_BOOL_WORDS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})
ENV_KEY = "env"  # TRL's block of environment variables
LAUNCH_KEY = "config_file"  # accelerate's file, with which `trl-ext` launches the run unless a flag overrides it
# Launcher arguments that people write in a recipe. Not read from accelerate's parser, which imports torch.
_LAUNCH_KEYS = frozenset(
    "deepspeed_config_file gpu_ids machine_rank main_process_ip main_process_port mixed_precision "
    "multi_gpu num_machines num_processes use_deepspeed zero_stage".split()
)
PATH_KEYS = ("deepspeed", "memory", LAUNCH_KEY)  # files that `trl-ext plan` writes next to its recipe


def field_types(dataclass_types: Iterable[type]) -> dict[str, Any]:
    """Return the type of every field that a recipe may set, over all dataclasses of a script."""
    types_of: dict[str, Any] = {}
    for dataclass_type in dataclass_types:
        hints = get_type_hints(dataclass_type)
        for field in dataclasses.fields(dataclass_type):
            if field.init:
                # Some fields of transformers are typed `float` and default to None, which is then a valid value.
                types_of[field.name] = hints[field.name] | None if field.default is None else hints[field.name]
    return types_of


def read_recipe(path: str | Path, types_of: Mapping[str, Any]) -> dict[str, Any]:
    """Read a recipe's keys and values, `env` included.

    Args:
        types_of: Type of every valid key, see `field_types`.

    Raises:
        ConfigError: The file is missing or not YAML, or a key is unknown, occurs twice or has a value of another type.
    """
    text, node = _parse(path)
    problems = [f"{path}, line {line}: {problem}" for line, problem in _problems(node, types_of)]
    if problems:
        raise ConfigError("\n".join(problems))
    return yaml.safe_load(text)


def paths_beside(path: str | Path, keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a recipe that name a file next to it, with absolute paths: a plan works from any folder."""
    folder = Path(path).resolve().parent
    named = {key: folder / keys[key] for key in PATH_KEYS if re.search(r"/|\.(json|ya?ml)$", str(keys.get(key)))}
    return {key: str(file) for key, file in named.items() if file.exists()}


def launch_file(path: str | Path) -> str | None:
    """Return the launch file that a recipe names, as an absolute path if it is next to the recipe; None without it.

    Also None for a recipe that cannot be read: the caller reads it again and reports the problem.
    """
    try:
        keys = yaml.safe_load(_parse(path)[0])
    except (ConfigError, yaml.YAMLError, ValueError):
        return None
    named = {**keys, **paths_beside(path, keys)}.get(LAUNCH_KEY)
    return None if named is None else str(named)


def _parse(path: str | Path) -> tuple[str, yaml.MappingNode]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"There is no recipe {path}. Check the path given to --config.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: this is not valid YAML: {error.problem}.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}.") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"The recipe {path} holds no keys. Write one `key: value` per line.")
    return text, node


def _problems(node: yaml.MappingNode, types_of: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    yield from _repeated_keys(node)
    for key_node, value_node in _pairs(node):
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key == ENV_KEY:
            if not isinstance(value_node, yaml.MappingNode):
                yield line, f"'{ENV_KEY}' must be a mapping of environment variables."
            else:
                yield from _unreadable(value_node)
        elif key not in types_of and key != LAUNCH_KEY:
            suggestion = (
                did_you_mean(key.replace("-", "_"), types_of) or "Remove it, or list the valid keys with --help."
            )
            if key in _LAUNCH_KEYS:
                suggestion = f"It belongs to `accelerate launch`: give --{key} on the command line, before the script."
            yield line, f"unknown key '{key}'. {replacement(key) or suggestion}"
        else:
            yield from _value_problems(key, types_of.get(key, str), value_node)


def _repeated_keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield keys that occur twice; YAML would silently keep the last value."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key_node, value_node in _pairs(node):
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_line:
                yield line, f"the key '{key}' is on line {first_line[key]} as well. Keep one of the two."
            first_line.setdefault(key, line)
            yield from _repeated_keys(value_node)


def _value_problems(key: str, hint: Any, node: yaml.Node) -> Iterator[tuple[int, str]]:
    (item_type,) = get_args(hint) if len(get_args(hint)) == 1 else (None,)  # TRL's DatasetConfig, under `datasets`
    if unreadable := list(_unreadable(node)):
        yield from unreadable
        return
    value = SafeConstructor().construct_document(node)
    if isinstance(item_type, type) and dataclasses.is_dataclass(item_type) and isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                yield from _problems(item, field_types([item_type]))
            else:
                yield item.start_mark.line + 1, f"each item of '{key}' must be a mapping."
    elif not fits(hint, value):  # with advice for the two slips that YAML invites
        advice = ""
        if isinstance(value, bool):
            advice = f' YAML reads a bare {_shown(node)} as {str(value).lower()}; write "{_shown(node)}" for the word.'
        elif isinstance(node, yaml.ScalarNode) and value is not None and fits(hint, [value]):
            advice = f" Write [{_shown(node)}]."
        yield node.start_mark.line + 1, f"'{key}' must be {in_words(hint)}, not {_shown(node)}.{advice}"


def _unreadable(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield values that cannot be read: a tag such as !!python/name, which could run code, or a date of month 13."""
    try:
        SafeConstructor().construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or node.start_mark).line + 1
        yield line, f"this value cannot be read: {error.problem}. Write plain values without tags."
    except ValueError as error:
        yield node.start_mark.line + 1, f"this value cannot be read: {error}. Write it in quotes if it is text."


def _shown(node: yaml.Node) -> str:
    """Return a value as it is written in the file."""
    if isinstance(node, yaml.ScalarNode):
        return node.value or "empty"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return keys and values of a mapping, without YAML's merge key `<<`."""
    return [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]


# Values ---------------------------------------------------------------------------------------------------------


def fits(hint: Any, value: Any) -> bool:
    """Return True if `value`, as YAML read it, can become a field of type `hint`.

    A type that is not listed here accepts every value: rejecting a recipe that TRL would run is worse than leaving a
    bad value to TRL's check.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(member, value) for member in _members(hint))
    if origin is Literal:
        return value in get_args(hint) or value in [str(choice) for choice in get_args(hint)]
    if origin is list or hint is list:
        return isinstance(value, list) and all(fits((get_args(hint) or (Any,))[0], item) for item in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is type(None):
        return value is None
    if isinstance(hint, type):
        return _fits_class(hint, value)
    return True


def in_words(hint: Any) -> str:
    """Name a field's type as the end of the sentence "it must be ..."."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(m) for m in _members(hint) if m is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(hint))}"
    if origin is list or hint is list:
        return "a list"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(member.value) for member in hint)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(hint, "another type")


def _members(hint: Any) -> list[Any]:
    """Return the members of a union, without the `str` that transformers writes next to an enum."""
    members = list(get_args(hint))
    if any(isinstance(member, type) and issubclass(member, Enum) for member in members):
        members.remove(str)
    return members


def _fits_class(hint: type, value: Any) -> bool:
    if issubclass(hint, Enum):
        # OptimizerNames and similar enums also accept hyphens for underscores.
        return isinstance(value, str) and value.replace("-", "_") in {str(m.value).replace("-", "_") for m in hint}
    if hint is bool:
        return isinstance(value, bool) or str(value).lower() in _BOOL_WORDS
    if hint is str:
        # TRL takes `scale_rewards: false` for a field typed str, so every scalar passes.
        return not isinstance(value, (list, dict)) and value is not None
    if hint in (int, float):
        if not isinstance(value, str):
            return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        try:  # a quoted number, and `3e-5`, which YAML reads as text
            hint(value)
        except ValueError:
            return False
    return True


# The command line -------------------------------------------------------------------------------------------------


def option_names(parser: ArgumentParser) -> list[str]:
    """Return the names of a parser's long options, without leading dashes and with underscores."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    return list(dict.fromkeys(flag.removeprefix("--").replace("-", "_") for flag in flags))


def unknown_argument(word: str, valid_names: Sequence[str]) -> ConfigError:
    """Make the error for an unknown word of the command line."""
    if not word.startswith("--"):
        return ConfigError(f"Unexpected '{word}' on the command line. Give values after their flag: --KEY VALUE.")
    flag = word.partition("=")[0]
    close = get_close_matches(flag.removeprefix("--").replace("-", "_"), valid_names, n=1)
    advice = f"Did you mean --{close[0]}?" if close else "List them with --help."
    return ConfigError(f"Unknown flag {flag}. {replacement(flag.removeprefix('--')) or advice}")


def argument_problem(message: str, types_of: Mapping[str, Any]) -> ConfigError:
    """Turn argparse's message about an argument into a ConfigError; `types_of` is from `field_types`."""
    match = re.match(r"argument --(?P<key>[\w-]+)[^:]*: (?P<reason>.*)", message, flags=re.DOTALL)
    if match is None:
        return ConfigError(f"Command line: {message.rstrip('.')}.")
    key, value = match["key"], _WRONG_VALUE.fullmatch(match["reason"])
    if value is None or key not in types_of:
        return ConfigError(f"--{key}: {match['reason'].rstrip('.')}.")
    return ConfigError(f"--{key} must be {in_words(types_of[key])}, not '{value['other'] or value['bool']}'.")

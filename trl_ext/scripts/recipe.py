"""Read a YAML recipe strictly: every key must be known, stand once and hold a value of its type.

TRL's own reader ignores a misspelt key under `accelerate launch`, and a run then trains for hours with a default. Here
all problems of a file are reported together, each with its line. Command lines get the same sentences.
"""

import dataclasses
import difflib
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from yaml.constructor import SafeConstructor

from trl_ext.errors import ConfigError
from trl_ext.scripts.value_types import fits, in_words

# argparse's and transformers' words for a value of another type.
_WRONG_VALUE = re.compile(
    r"invalid \w+ value: '(?P<other>.*)'|Truthy value expected: got (?P<bool>.*) but .*", re.DOTALL
)
ENV_KEY = "env"  # TRL's block of environment variables
LAUNCH_KEY = "config_file"  # accelerate's file, by which `trl-ext` launches the run unless a flag says otherwise
NO_FIELDS = frozenset({ENV_KEY, LAUNCH_KEY})  # the keys that belong to no dataclass
PATH_KEYS = ("deepspeed", "memory", LAUNCH_KEY)  # files that `trl-ext plan` writes beside its recipe


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most probably misspells, None if none is close."""
    matches = difflib.get_close_matches(word.replace("-", "_"), list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def field_types(dataclass_types: Iterable[type]) -> dict[str, Any]:
    """The type of every field that a recipe may set, over all dataclasses of a script."""
    types_of: dict[str, Any] = {}
    for dataclass_type in dataclass_types:
        hints = get_type_hints(dataclass_type)
        for field in dataclasses.fields(dataclass_type):
            if field.init:
                # Some fields of transformers are typed `float` and default to None: None is then a value of theirs.
                types_of[field.name] = hints[field.name] | None if field.default is None else hints[field.name]
    return types_of


def read_recipe(
    path: str | Path, types_of: Mapping[str, Any], explain_unknown: Callable[[str], str | None] = lambda key: None
) -> dict[str, Any]:
    """Read a recipe's keys and values, `env` included.

    Args:
        path: The YAML file.
        types_of: Every valid key and its type, see `field_types`.
        explain_unknown: What to do about an unknown key that the caller recognises, None to suggest the nearest key.

    Raises:
        ConfigError: The file is missing or not YAML, or a key is unknown, stands twice or has a value of another type.
    """
    text, node = _parse(path)
    problems = [f"{path}, line {line}: {problem}" for line, problem in _problems(node, types_of, explain_unknown)]
    if problems:
        raise ConfigError("\n".join(problems))
    return yaml.safe_load(text)


def paths_beside(path: str | Path, keys: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a recipe whose file lies beside it, with the file's whole path: a plan works from any folder."""
    folder = Path(path).resolve().parent
    named = {key: folder / keys[key] for key in PATH_KEYS if re.search(r"/|\.(json|ya?ml)$", str(keys.get(key)))}
    return {key: str(file) for key, file in named.items() if file.exists()}


def launch_file(path: str | Path) -> str | None:
    """The launch file that a recipe names, with its whole path if it lies beside it; None if it names none.

    A recipe that cannot be read names none: who reads the rest of it says why.
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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: this is not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"The recipe {path} holds no keys. Write one `key: value` per line.")
    return text, node


def _problems(
    node: yaml.MappingNode, types_of: Mapping[str, Any], explain_unknown: Callable[[str], str | None]
) -> Iterator[tuple[int, str]]:
    yield from _repeated_keys(node)
    for key_node, value_node in _pairs(node):
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key == ENV_KEY:
            if not isinstance(value_node, yaml.MappingNode):
                yield line, f"'{ENV_KEY}' must be a mapping of environment variables."
            else:
                yield from _unreadable(value_node)
        elif key not in types_of and key != LAUNCH_KEY:
            guess = nearest(key, types_of)
            suggestion = f"Did you mean '{guess}'?" if guess else "Remove it, or list the valid keys with --help."
            yield line, f"unknown key '{key}'. {explain_unknown(key) or suggestion}"
        else:
            yield from _value_problems(key, types_of.get(key, str), value_node)


def _repeated_keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield keys that stand twice, of which YAML would keep the last without a word."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key_node, value_node in _pairs(node):
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_line:
                yield line, f"the key '{key}' already stands on line {first_line[key]}. Keep one of the two."
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
                yield from _problems(item, field_types([item_type]), lambda key: None)
            else:
                yield item.start_mark.line + 1, f"each item of '{key}' must be a mapping."
    elif not fits(hint, value):
        yield node.start_mark.line + 1, f"'{key}' must be {in_words(hint)}, not {_shown(node)}.{_advice(hint, node)}"


def _unreadable(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield what cannot become a value: a tag such as !!python/name, which could run code, or a date of month 13."""
    try:
        SafeConstructor().construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or node.start_mark).line + 1
        yield line, f"this value cannot be read: {error.problem}. Write plain values without tags."
    except ValueError as error:
        yield node.start_mark.line + 1, f"this value cannot be read: {error}. Write it in quotes if it is text."


def _shown(node: yaml.Node) -> str:
    """A value as it stands in the file."""
    if isinstance(node, yaml.ScalarNode):
        return node.value or "empty"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _advice(hint: Any, node: yaml.Node) -> str:
    """A further sentence for the two slips that YAML invites, else an empty string."""
    value = SafeConstructor().construct_document(node)
    if isinstance(value, bool):
        return f' YAML reads a bare {_shown(node)} as {str(value).lower()}; write "{_shown(node)}" for the word.'
    if isinstance(node, yaml.ScalarNode) and value is not None and fits(hint, [value]):
        return f" Write [{_shown(node)}]."
    return ""


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping, without YAML's merge key `<<`."""
    return [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]


# The command line -------------------------------------------------------------------------------------------------


def option_names(parser: ArgumentParser) -> list[str]:
    """Names of all long options of a parser, without dashes in front and with underscores inside."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    return list(dict.fromkeys(flag.removeprefix("--").replace("-", "_") for flag in flags))


def unknown_argument(word: str, valid_names: Sequence[str]) -> ConfigError:
    """Make the error for a word of the command line that nothing knows."""
    if not word.startswith("--"):
        return ConfigError(f"Unexpected '{word}' on the command line. Give values after their flag: --KEY VALUE.")
    flag = word.partition("=")[0]
    guess = nearest(flag.removeprefix("--"), valid_names)
    return ConfigError(f"Unknown flag {flag}. {f'Did you mean --{guess}?' if guess else 'List them with --help.'}")


def argument_problem(message: str, types_of: Mapping[str, Any]) -> ConfigError:
    """Turn argparse's complaint about one argument into an error of ours; `types_of` is from `recipe.field_types`."""
    match = re.match(r"argument --(?P<key>[\w-]+)[^:]*: (?P<reason>.*)", message, flags=re.DOTALL)
    if match is None:
        return ConfigError(f"Command line: {message.rstrip('.')}.")
    key, value = match["key"], _WRONG_VALUE.fullmatch(match["reason"])
    if value is None or key not in types_of:
        return ConfigError(f"--{key}: {match['reason'].rstrip('.')}.")
    return ConfigError(f"--{key} must be {in_words(types_of[key])}, not '{value['other'] or value['bool']}'.")

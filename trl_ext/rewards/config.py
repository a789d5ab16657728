"""Read rules from a mapping or a YAML file, and write them.

    rules:
      - {rule: answer, gold: answer, kind: number}
      - {rule: length, high: 24, weight: 0.1, gate: answer}
      - {rule: my_package.my_module.MyRule, weight: 0.5}
    clip: [-1, 1]
    limits: {cpu_s: 2}
    on_error: floor

A rule's keys are the fields of its class. A dotted name is imported, which runs that module: load only trusted files.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trl_ext.errors import ConfigError, RuleError, SupportError, did_you_mean
from trl_ext.rewards.base.rule import Rule, check_set_key, place_of, snake_case
from trl_ext.rewards.instruction_kinds.instructions import Instructions
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.rules.answer import Answer
from trl_ext.rewards.rules.call import Call
from trl_ext.rewards.rules.code import Code
from trl_ext.rewards.rules.grammar import Grammar, LanguageTool
from trl_ext.rewards.rules.json_match import JsonMatch
from trl_ext.rewards.rules.json_schema import JsonSchema
from trl_ext.rewards.rules.judge import Judge
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.language import Language
from trl_ext.rewards.rules.length import Length
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.rules.pattern import Pattern
from trl_ext.rewards.rules.relevance import Relevance
from trl_ext.rewards.rules.remote import Remote
from trl_ext.rewards.rules.repetition import Repetition
from trl_ext.rewards.rules.rubric import Rubric
from trl_ext.rewards.rules.tags import Tags

_RULES: tuple[type[Rule], ...] = (
    Answer, Call, Code, Grammar, Instructions, JsonMatch, JsonSchema, Judge, Keywords, Language, LanguageTool,
    Length, Math, Pattern, Relevance, Remote, Repetition, Rubric, Tags,
)  # fmt: skip
SHIPPED = {snake_case(rule.__name__): rule for rule in _RULES}

GROUP = "trl_ext.rules"  # Entry points by which packages offer rules under short names.
# A set's keys besides its rules.
_SET_KEYS = ("clip", "name", "limits", "isolate", "on_error", "on_unscored", "normalise")


def _field_names(kind: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


_COMMON = _field_names(Rule)

KeyPath = tuple[str | int, ...]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The source of a mapping, for messages: a file with the line of each key, or only a name."""

    name: str = "The mapping"
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def at(self, *path: str | int) -> str:
        """Return the place of a key: `rules.yaml, line 3` or `The mapping, rules[0].gold`."""
        if path in self.lines:
            return f"{self.name}, line {self.lines[path]}"
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        return f"{self.name}, {steps}" if steps else self.name


def load_rules(path: str | Path, make: Callable[..., Made]) -> Made:
    """Call `make` with the arguments that a YAML file describes; ConfigError names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of a YAML file.") from error
    try:
        mapping, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from error
    arguments = build_rules(mapping, ConfigSource(str(path), dict(_lines(node, (), str(path)))))
    try:
        return make(**arguments)
    except RuleError as error:
        raise ConfigError(f"{path}: {error}") from error


def build_rules(mapping: Any, source: ConfigSource | None = None) -> dict[str, Any]:
    """Return the arguments of RuleSet that a mapping describes; ConfigError names the wrong key."""
    source = source or ConfigSource()
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("rules"), list):
        raise ConfigError(f"{source.name} has no list of rules. Write rules: [{{rule: answer, gold: answer}}].")
    if mapping.keys() & {"model_name_or_path", "dataset_name", "output_dir", "max_steps"}:
        raise ConfigError(f"{source.name} is a recipe. Give rules.yaml of a run's folder, or a file of rules alone.")
    _check_keys(mapping, ("rules", *_SET_KEYS), source, (), "unknown key")
    rules = [build_rule(entry, source, index) for index, entry in enumerate(mapping["rules"])]
    given = {key: mapping[key] for key in _SET_KEYS if mapping.get(key) is not None}
    for key, value in given.items():
        try:
            check_set_key(key, value)
        except RuleError as error:
            raise ConfigError(f"{source.at(key)}: {error}") from error
    if "limits" in given:
        given["limits"] = _build_limits(given["limits"], source)
    return {"rules": rules, **given}


def _build_limits(entry: Any, source: ConfigSource) -> Limits:
    """Make the limits from their mapping, or ConfigError."""
    where = source.at("limits")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: limits is {entry!r}. Write limits: {{cpu_s: 2, memory_mib: 1024}}.")
    _check_keys(entry, _field_names(Limits), source, ("limits",), "limits has no key")
    try:
        return Limits(**entry)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(
    entry: Mapping[Any, Any], known: Sequence[str], source: ConfigSource, path: KeyPath, problem: str
) -> None:
    """Raise ConfigError for the first unknown key of a mapping.

    Args:
        entry: The mapping to check.
        known: Its possible keys.
        source: The source of the mapping, which gives each key's line.
        path: The path of the mapping in its source.
        problem: Words of the message before the key, such as "unknown key".
    """
    for key in entry:
        if key not in known:
            raise ConfigError(f"{source.at(*path, key)}: {problem} '{key}'. {nearest(key, known)}")


def build_rule(entry: Any, source: ConfigSource, index: int) -> Rule:
    """Make a rule from its mapping, the `index`-th of the list, or ConfigError."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("rule"), str):
        raise ConfigError(f"{source.at('rules', index)}: {entry!r} names no rule. Write {{rule: answer, ...}}.")
    kind = rule_class(entry["rule"], source.at("rules", index, "rule"))
    keys = _field_names(kind)
    fields = {key: value for key, value in entry.items() if key != "rule"}
    _check_keys(fields, keys, source, ("rules", index), f"rule '{entry['rule']}' has no key")
    required = [item.name for item in dataclasses.fields(kind) if item.default is item.default_factory]
    missing = [key for key in required if key not in entry]
    if missing:
        where = source.at("rules", index)
        raise ConfigError(f"{where}: rule '{entry['rule']}' needs the key '{missing[0]}'. Add it.")
    if kind is Call:
        fields["function"] = _imported(str(fields["function"]), source.at("rules", index, "function"))
    try:
        return kind(**fields)
    except (RuleError, SupportError, TypeError) as error:
        raise ConfigError(f"{source.at('rules', index)}: {error}") from error
    except Exception as error:  # The `check` of a user's rule may raise anything.
        said = f"rule '{entry['rule']}' raised {type(error).__name__}: {error} ({place_of(error)})"
        raise ConfigError(f"{source.at('rules', index)}: {said}") from error


def rule_class(name: str, where: str) -> type[Rule]:
    """Return the class of a short or dotted name: shipped, offered by a package, or imported."""
    if "." not in name:
        if name in SHIPPED:
            return SHIPPED[name]
        offered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
        if name not in offered:
            hint = "Name your rule by its dotted path, such as my_package.my_module.MyRule."
            raise ConfigError(f"{where}: unknown rule '{name}'. {nearest(name, [*SHIPPED, *offered])} {hint}")
        name = offered[name].replace(":", ".")
    found = _imported(name, where)
    if not isinstance(found, type) or not issubclass(found, Rule):
        raise ConfigError(f"{where}: '{name}' is not a subclass of trl_ext.rewards.Rule. Derive it from Rule.")
    return found


def _imported(name: str, where: str) -> Any:
    """Import an object by its dotted path, which runs its module."""
    module, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:  # Programs such as `trl-ext` do not search it.
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the name has no dot
        raise ConfigError(f"{where}: '{name}' cannot be imported: {error}. Give package.module.name.") from error


def nearest(key: object, valid: Iterable[str]) -> str:
    """Return the hint for an unknown key: `Did you mean 'gold'? There are: gold, kind, ...`"""
    valid = list(valid)
    return f"{did_you_mean(key, valid)} There are: {', '.join(valid)}.".lstrip()


def describe_rules(rules: Any) -> dict[str, Any]:
    """Return the mapping from which `build_rules` makes this RuleSet."""
    settings = {key: value for key, value in changed(rules).items() if key in _SET_KEYS}
    if "limits" in settings:
        settings["limits"] = changed(rules.limits)
    if "clip" in settings:
        settings["clip"] = list(rules.clip)
    return {"rules": [describe_rule(rule) for rule in rules.rules], **settings}


def describe_rule(rule: Rule) -> dict[str, Any]:
    """Return a rule as a mapping of the fields that are not at their default, fields of its class first."""
    kind = type(rule)
    short = snake_case(kind.__name__)
    entry: dict[str, Any] = {"rule": short if SHIPPED.get(short) is kind else f"{kind.__module__}.{kind.__qualname__}"}
    for key, value in sorted(changed(rule).items(), key=lambda item: item[0] in _COMMON):
        if (key, value) != ("name", short):
            entry[key] = _plain(rule, key, value)
    return entry


def changed(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their default, or have none, by name."""
    values = {}
    for item in dataclasses.fields(settings):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if item.init and getattr(settings, item.name) != default:
            values[item.name] = getattr(settings, item.name)
    return values


def _plain(rule: Rule, key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(rule, key, item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(rule, key, item) for name, item in value.items()}
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(rule, Call) and key == "function":
        return f"{value.__module__}.{value.__qualname__}"
    raise ConfigError(f"Rule '{rule.name}': {key}={value!r} cannot be written to YAML. Use text, numbers and lists.")


def _lines(node: Any, path: KeyPath, file: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the line, from 1, on which each key and list entry starts; ConfigError for a duplicate key."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{file}, line {line}: the key '{key.value}' is given twice. Remove a line.")
            seen.add(key.value)
            yield (*path, key.value), line
            yield from _lines(value, (*path, key.value), file)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), file)

"""Judge whether a YAML value fits a dataclass field, and name that field's type in English.

Only what a recipe can get wrong is judged. A type that is not listed here accepts every value, because rejecting a
recipe that TRL would run is worse than passing a bad value on to TRL's own check.
"""

import dataclasses
import types
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

# The spellings that argparse turns into a bool for TRL; YAML quotes make them strings.
_BOOL_WORDS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})


def fits(hint: Any, value: Any) -> bool:
    """True if `value`, as YAML read it, can become a field of type `hint`."""
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
    """The members of a union. Next to an enum, transformers writes `| str` but means the enum's own values."""
    members = list(get_args(hint))
    if any(isinstance(member, type) and issubclass(member, Enum) for member in members):
        members.remove(str)
    return members


def _fits_class(hint: type, value: Any) -> bool:
    if issubclass(hint, Enum):
        # OptimizerNames and its like also accept hyphens for underscores.
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

"""Python 3.11.2, which Debian 12 has, loses its place where a repetition of a possessive group begins and fails.

`(?:ab)*+` then matches "a" as well (compare github.com/python/cpython, issue 106052); `(?>(?:ab)*)` does not.
"""

import importlib
import pkgutil
import re
import sys
from re import _constants as codes
from re import _parser as parser

import pytest

import trl_ext.rewards

POSSESSIVE = codes.POSSESSIVE_REPEAT


def _patterns():
    for module in pkgutil.walk_packages(trl_ext.rewards.__path__, "trl_ext.rewards."):
        if sys.platform == "linux" or "isolation" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                    yield f"{module.name}.{name}", value


def _parts(value):
    """Yield all operations of a parsed pattern."""
    if isinstance(value, parser.SubPattern):
        for operation in value:
            yield operation
            yield from _parts(operation[1])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)


def loses_its_place(pattern: re.Pattern) -> bool:
    """Return True for a repeated possessive group with a part that may match and the next one fail."""
    bodies = (value[-1] for code, value in _parts(parser.parse(pattern.pattern, pattern.flags)) if code is POSSESSIVE)
    return any(not _is_of_one_part(body) for body in bodies)


def _is_of_one_part(body: parser.SubPattern) -> bool:
    if len(body) != 1:
        return False
    code, value = body[0]
    return all(map(_is_of_one_part, value[1])) if code is codes.BRANCH else code is not codes.SUBPATTERN


def test_the_check_finds_such_a_group():
    assert loses_its_place(re.compile("(?:ab){0,4}+c"))
    assert loses_its_place(re.compile("(?:[0-9]|ab)*+c"))
    assert not loses_its_place(re.compile("(?:[0-9]|a)*+c"))
    assert not loses_its_place(re.compile("(?>(?:ab)*)c"))


@pytest.mark.parametrize("pattern", [pytest.param(pattern, id=name) for name, pattern in _patterns()])
def test_no_possessive_group_loses_its_place(pattern):
    assert not loses_its_place(pattern)

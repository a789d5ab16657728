"""The rewards package as a whole: examples, exports, what it must not import, and its regular expressions.

Python 3.11.2, which Debian 12 has, loses its place where a repetition of a possessive group begins and fails:
`(?:ab)*+` then matches "a" as well (compare github.com/python/cpython, issue 106052); `(?>(?:ab)*)` does not.
"""

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from re import _constants as codes
from re import _parser as parser

import pytest

import trl_ext.rewards
from trl_ext import rewards

PREFIX = "trl_ext.rewards."
MODULES = [
    module.name.removeprefix(PREFIX)
    for module in pkgutil.walk_packages(rewards.__path__, PREFIX)
    if ">>>" in Path(importlib.util.find_spec(module.name).origin).read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_every_example_gives_the_output_that_it_shows(module):
    names = {name: getattr(rewards, name) for name in rewards.__all__}
    result = doctest.testmod(importlib.import_module(f"trl_ext.rewards.{module}"), extraglobs=names)
    assert result.failed == 0


@pytest.mark.slow
def test_the_package_imports_neither_torch_nor_trl():
    code = "import sys, trl_ext.rewards; print(sorted({'torch', 'trl', 'transformers', 'numpy'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


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

"""The rewards package as a whole: examples, exports, and what it must not import."""

import doctest
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_package_imports_neither_torch_nor_trl():
    code = "import sys, trl_ext.rewards; print(sorted({'torch', 'trl', 'transformers', 'numpy'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"

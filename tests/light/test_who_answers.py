"""The page of refusals names tests that exist, and what was removed is refused by name."""

import re

import pytest

from tests.conftest import ROOT
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError
from trl_ext.rewards import RuleSet

PAGE = (ROOT / "docs" / "reference" / "refusals.md").read_text(encoding="utf-8")
REMOVED = {
    "procedural": {"rule": "procedural"},
    "soft_overlong": {"rule": "soft_overlong"},
    "cosine": {"rule": "cosine"},
    "sandbox": {"rule": "code", "sandbox": "http://localhost"},
    "base_url": {"rule": "code", "base_url": "http://localhost"},
    "schedule": {"rule": "length", "schedule": [[0, 1]]},
    "schema_file": {"rule": "json_schema", "schema_file": "schema.json"},
    "profile": {"rule": "math", "profile": "eval"},
    "price": {"rule": "judge", "price": {"input": 1}},
    "contains": {"rule": "answer", "match": "contains"},
}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("name", REMOVED)
def test_a_rule_or_key_that_was_removed_is_named(name):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        RuleSet.from_dict({"rules": [REMOVED[name]]})
    assert f"`{name}`" in PAGE or f"match: {name}" in PAGE


@pytest.mark.parametrize("command", ["dryrun", "merge", "calibrate"])
def test_a_command_that_was_removed_is_named(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command])
    assert stopped.value.code == 2 and f"There is no command '{command}'" in capsys.readouterr().err

"""`import trl_ext` is cheap, and its public names are there."""

import subprocess
import sys

import pytest

import trl_ext

HEAVY = ("torch", "trl", "transformers", "vllm", "deepspeed")


@pytest.mark.slow
def test_neither_the_package_nor_its_rules_nor_its_resources_pull_in_anything_heavy():
    code = "import sys, trl_ext, trl_ext.rewards, trl_ext.resources as r; r.accelerate_config('cpu'); "
    code += f"print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_has_a_home():
    assert set(trl_ext.__all__) == {*trl_ext._HOME, "__version__"}


@pytest.mark.slow
def test_the_monitor_offers_its_names_without_loading_what_they_need():
    code = "import sys, trl_ext.monitor; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    from trl_ext.monitor import ProgressLine, write_report

    assert ProgressLine.__name__ == "ProgressLine" and callable(write_report)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match="RuleSet"):
        trl_ext.nothing_of_the_kind  # noqa: B018


def test_a_from_import_says_where_trls_own_names_are():
    """Python drops the words of an AttributeError there, and keeps the words of an ImportError."""
    for name in ("ModelConfig", "TrlParser", "get_peft_config", "SFTTrainer"):
        with pytest.raises(ImportError, match=f"^'{name}' is TRL's and the same here: from trl import {name}.$"):
            exec(f"from trl_ext import RuleSet, {name}")
        assert not hasattr(trl_ext, name)
    with pytest.raises(ImportError, match=r"has no attribute 'GRPOTrianer'\. It offers AsyncGRPOTrainer, GRPOConfig"):
        exec("from trl_ext import GRPOTrianer")
    exec("from trl_ext import memory, rewards")  # submodules

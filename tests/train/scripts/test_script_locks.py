"""A script under DeepSpeed names a lock that a killed build has left, before anything waits for it."""

import os
import time
from types import SimpleNamespace

import pytest

from trl_ext.scripts import grpo, training


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock of two hours ago, in a folder of compiled helpers of the test's own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    file = tmp_path / "cpu_adam" / "lock"
    file.parent.mkdir()
    file.touch()
    os.utime(file, (time.time() - 7_200,) * 2)
    return file


def nothing_parsed(parser, argv):
    """Give the script's arguments, as far as it looks at them before its training."""
    return grpo.GRPOScriptArguments(), SimpleNamespace(output_dir="out", fp16=False, given=frozenset())


def start(argv):
    """Start the script as far as its training."""
    trained = []
    training.main("trl_ext.scripts.grpo", grpo.make_parser, lambda *parsed: trained.append(parsed), argv)
    assert len(trained) == 1


@pytest.mark.parametrize("says_so", ["launcher", "flag", "recipe"])
def test_a_stale_lock_is_a_warning_under_deepspeed(says_so, lock, tmp_path, monkeypatch, capsys):
    argv = ["--output_dir", str(tmp_path / "out"), "--use_cpu"]
    if says_so == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    elif says_so == "flag":
        argv += ["--deepspeed", "zero2.json"]
    else:
        (tmp_path / "recipe.yaml").write_text("deepspeed: zero2.json\n")
        argv += ["--config", str(tmp_path / "recipe.yaml")]
    monkeypatch.setattr(training.StrictParser, "parse", nothing_parsed)  # DeepSpeed itself is not started
    start(argv)
    said = capsys.readouterr().err
    assert f"warning: {lock} is 2 hours old" in said and f"rm {lock}" in said
    assert lock.exists()


def test_other_runs_and_other_ranks_are_silent(lock, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training.StrictParser, "parse", nothing_parsed)
    start(["--output_dir", str(tmp_path / "out")])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "1")
    start(["--output_dir", str(tmp_path / "out")])
    assert capsys.readouterr().err == ""

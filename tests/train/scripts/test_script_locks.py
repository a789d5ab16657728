"""Whoever makes a config under DeepSpeed is told of a lock that a killed build has left, before anything waits."""

import os
import time
from threading import Timer

import pytest
from torch.utils.file_baton import FileBaton

from tests import recipes
from trl_ext import GRPOConfig, PPOConfig, RewardConfig
from trl_ext.doctor import build_locks
from trl_ext.errors import ConfigError
from trl_ext.scripts import grpo


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock of two hours ago, in a folder of compiled helpers of the test's own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    file = tmp_path / "cpu_adam" / "lock"
    file.parent.mkdir()
    file.touch()
    os.utime(file, (time.time() - 7_200,) * 2)
    build_locks.warn_once.cache_clear()
    yield file
    build_locks.warn_once.cache_clear()


class Reached(Exception):
    """TRL's config, which starts DeepSpeed's communication, was about to begin."""


@pytest.fixture
def stopped(monkeypatch):
    """Configs that end where TRL's own begin: DeepSpeed itself is not started."""
    for config in (GRPOConfig, RewardConfig):

        def reach(self):
            raise Reached

        base = next(one for one in config.__mro__ if one.__module__.startswith("trl."))
        monkeypatch.setattr(base, "__post_init__", reach)


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig, RewardConfig])
def test_a_config_of_a_users_own_script_names_a_stale_lock_once(config, lock, stopped, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for _ in range(2):
        with pytest.raises(Reached):
            config(str(tmp_path / "out"))
    said = capsys.readouterr().err
    assert said.count(f"warning: {lock} is 2:00:0") == 1 and f"rm {lock}" in said
    assert lock.exists()


def test_a_run_that_needs_the_helper_ends_with_the_sentence_and_waits_for_a_build_at_work(
    lock, stopped, tmp_path, monkeypatch
):
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # restored after the test
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(Reached):
        GRPOConfig(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=f"{lock} is 2:00:0.*remove it: rm {lock}"):
        FileBaton(str(lock)).wait()
    with lock.open():
        Timer(0.3, lock.unlink).start()
        FileBaton(str(lock)).wait()
    lock.touch()  # of another machine, a moment ago
    Timer(0.3, lock.unlink).start()
    FileBaton(str(lock)).wait()
    assert not lock.exists()


def test_a_stale_lock_is_a_warning_of_the_scripts(lock, stopped, tmp_path, monkeypatch, capsys):
    recipe = recipes.recipe(tmp_path, deepspeed="zero2.json")
    for argv, by_launcher in ((["--deepspeed", "zero2.json"], False), (recipe, False), ([], True)):
        build_locks.warn_once.cache_clear()
        if by_launcher:
            monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(Reached):
            grpo.main(["--output_dir", str(tmp_path / "out"), "--use_cpu", *argv])
        assert f"warning: {lock} is 2:00:0" in capsys.readouterr().err


def test_other_runs_and_other_ranks_are_silent(lock, stopped, tmp_path, monkeypatch, capsys):
    with pytest.raises(Reached):
        GRPOConfig(str(tmp_path / "out"))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(Reached):
        GRPOConfig(str(tmp_path / "out"))
    assert "warning" not in capsys.readouterr().err

"""Locks in torch's folder of compiled helpers: which of them are stale, and who says so."""

import os
import sys
import time
from dataclasses import replace

import pytest

from tests.light.doctor.test_doctor import HEALTHY, llama_plan
from trl_ext.doctor import examine
from trl_ext.doctor.build_locks import STALE_AGE_S, build_locks, lock_warnings


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of compiled helpers, with `cpu_adam` in it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam"


def put_lock(folder, age_s):
    lock = folder / "lock"
    lock.touch()
    made_s = time.time() - age_s
    os.utime(lock, (made_s, made_s))
    return lock


def test_a_lock_that_nobody_holds_is_named_with_its_age_and_remedy_where_there_is_one(cache):
    assert build_locks() == () and lock_warnings() == []
    lock = put_lock(cache, age_s=3 * 3_600 + 5)
    [sentence] = lock_warnings()
    assert f"{lock} is 3 hours old" in sentence and "waits for it for ever" in sentence
    assert sentence.endswith(f"Remove it: rm {lock}")
    assert lock.exists()  # nobody but the user removes it


def test_a_young_lock_may_belong_to_a_build_elsewhere_and_one_that_a_process_has_open_is_well(cache):
    put_lock(cache, age_s=40)
    [found] = build_locks()
    assert not found.is_stale and found.finding.level == "note"
    assert "another machine or container" in found.finding.what and found.finding.advice.startswith("If no other")
    with put_lock(cache, age_s=2 * STALE_AGE_S).open():
        [found] = build_locks()
        assert found.builder == os.getpid() and not found.is_stale
        assert found.finding.level == "ok" and lock_warnings() == []
    assert build_locks()[0].is_stale


def test_a_path_with_a_space_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "my cache"))
    (tmp_path / "my cache" / "fused_adam").mkdir(parents=True)
    lock = put_lock(tmp_path / "my cache" / "fused_adam", age_s=7_200)
    assert f"rm '{lock}'" in lock_warnings()[0]


def test_torchs_own_place_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cu130" / "cpu_adam"
    place.mkdir(parents=True)
    put_lock(place, age_s=7_200)
    assert [lock.path for lock in build_locks()] == [str(place / "lock")]


def test_the_doctor_notes_a_stale_lock_and_refuses_a_plan_that_would_wait_for_it(cache):
    put_lock(cache, age_s=7_200)
    facts = replace(HEALTHY, build_locks=build_locks())
    [found] = [finding for finding in examine(facts) if str(cache) in finding.what]
    assert (found.level, found.subject) == ("note", "compiler")
    plan = llama_plan(method="full", zero_stage=3, offload="optimizer")
    problems = [finding for finding in examine(facts, plan) if finding.level == "problem"]
    assert any(str(cache) in finding.what and finding.advice == found.advice for finding in problems)
    assert not any(str(cache) in f.what for f in examine(facts, llama_plan()) if f.level == "problem")

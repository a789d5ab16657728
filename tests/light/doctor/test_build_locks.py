"""Locks in torch's folder of compiled helpers: which of them nobody holds, and who says so."""

import os
import sys
import time

import pytest

from trl_ext.doctor import Facts, examine
from trl_ext.doctor.build_locks import build_locks


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


def test_a_lock_that_nobody_holds_is_named_with_its_age_and_remedy(cache):
    assert build_locks() == ()
    lock = put_lock(cache, age_s=3 * 3_600 + 5)
    [found] = build_locks()
    assert found.finding.level == "note" and f"{lock} is 3:00:0" in found.finding.what
    assert "'cpu_adam' waits for it." in found.finding.what and found.finding.advice.endswith(f"remove it: rm {lock}")
    assert lock.exists()  # nobody but the user removes it


def test_a_lock_that_a_process_has_open_is_well(cache):
    with put_lock(cache, age_s=3_600).open():
        [found] = build_locks()
        assert found.builder == os.getpid() and found.finding.level == "ok"
    assert build_locks()[0].builder is None


def test_a_path_with_a_space_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "my cache"))
    (tmp_path / "my cache" / "fused_adam").mkdir(parents=True)
    lock = put_lock(tmp_path / "my cache" / "fused_adam", age_s=7_200)
    assert f"rm '{lock}'" in build_locks()[0].finding.advice


def test_torchs_own_place_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cu130" / "cpu_adam"
    place.mkdir(parents=True)
    put_lock(place, age_s=7_200)
    assert [lock.path for lock in build_locks()] == [str(place / "lock")]


def test_the_doctor_notes_it(cache):
    put_lock(cache, age_s=7_200)
    [found] = [finding for finding in examine(Facts(build_locks=build_locks())) if str(cache) in finding.what]
    assert (found.level, found.subject) == ("note", "compiler")

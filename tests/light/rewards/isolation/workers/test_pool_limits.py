"""Limits of the worker pool, and the breaker that stops a run whose machine fails."""

import os
import pickle

import pytest

from trl_ext.errors import ConfigError
from trl_ext.rewards.isolation.workers import limits as limits
from trl_ext.rewards.isolation.workers.breaker import Breaker
from trl_ext.rewards.isolation.workers.limits import Limits


def test_a_limit_that_cannot_hold_is_refused(subtests):
    for key, value in (
        *(("cpu_s", 0), ("cpu_s", -1.0), ("cpu_s", float("nan")), ("cpu_s", None), ("wall_s", "5"), ("wall_s", 1.0)),
        *(("memory_mib", 0.5), ("batch_s", float("inf")), ("workers", 0), ("workers", True), ("chunk", 1.5)),
        ("max_infra_frac", 2),
    ):
        with subtests.test(key=key), pytest.raises(ConfigError, match=key):
            Limits(**{key: value})


def test_the_wall_clock_gives_five_times_the_processor_time_and_limits_key_a_mapping():
    assert (Limits(cpu_s=0.5).row_wall_s, Limits(cpu_s=0.5, wall_s=0.7).row_wall_s) == (2.5, 0.7)
    assert {pickle.loads(pickle.dumps(Limits(cpu_s=3))): 1} == {Limits(cpu_s=3): 1}


def test_the_processors_are_shared_by_the_machines_ranks(monkeypatch):
    shares = ((16, "1", 15), (16, "8", 1), (16, "4", 3), (1, "1", 1), (64, "nonsense", 63))
    for cpus, local_world_size, workers in shares:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        monkeypatch.setattr(limits, "available_cpus", lambda cpus=cpus: cpus)
        assert (Limits().num_workers, Limits(workers=5).num_workers) == (workers, 5)


def test_a_containers_quota_bounds_the_processors(tmp_path):
    for text, cpus in (("max 100000\n", None), ("400000 100000\n", 4), ("50000 100000\n", 1), ("", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert limits.quota_cpus(tmp_path / "cpu.max") == cpus
    assert limits.quota_cpus(tmp_path / "none") is None
    assert 1 <= limits.available_cpus() <= len(os.sched_getaffinity(0))


def test_a_breaker_trips_above_its_share_and_stays_tripped():
    breaker = Breaker("math", 0.05)
    breaker.record(100, 5)
    assert breaker.tripped is None
    breaker.record(10, 1, "no process")
    assert breaker.tripped.startswith("6 of the last 110 rows")
    assert "no process" in breaker.tripped
    breaker.record(10**6, 0)
    assert breaker.tripped is not None


def test_a_few_rows_or_long_ago_ones_or_none_do_not_trip_a_breaker():
    few, old, none = (Breaker("math", share) for share in (0.05, 0.05, 0.0001))
    few.record(19, 19)
    for _ in range(10):
        old.record(1024, 40)
    for _ in range(100):
        none.record(512, 0)
    assert few.tripped is old.tripped is none.tripped is None
    old.record(1024, 200)
    assert old.tripped is not None


def test_a_breaker_trips_when_no_row_of_several_calls_has_a_verdict_in_time():
    breaker = Breaker("verifier", 0.05)
    for rows in (9, 9, 1):
        breaker.record(rows, 0, "asleep", late=rows)
    assert breaker.tripped is None, "19 rows say nothing"
    breaker.record(0, 0)  # all of its rows were known
    breaker.record(1, 0, "asleep", late=1)
    assert breaker.tripped.startswith("Rule 'verifier' gave no verdict in time for any of the last 20 rows, 4 calls")
    assert "asleep" in breaker.tripped


def test_one_verdict_in_time_keeps_a_breaker_from_tripping():
    breaker = Breaker("verifier", 0.05)
    for late in (512, 512, 511, 512, 512):
        breaker.record(512, 0, late=late)
    assert breaker.tripped is None

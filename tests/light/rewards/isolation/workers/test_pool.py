"""The worker pool's parts that need no worker: messages, verdicts, requests, limits, the breaker, other systems."""

import json
import os
import pickle
import socket
import sys
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict
from trl_ext.rewards.isolation.workers import limits as limits
from trl_ext.rewards.isolation.workers import pool, supervision, wire, worker
from trl_ext.rewards.isolation.workers import server as server_module
from trl_ext.rewards.isolation.workers.breaker import Breaker
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool, shared_pool
from trl_ext.rewards.isolation.workers.wire import packed


@dataclass(frozen=True, slots=True)
class Raising(Rule):
    """Raises what the row's column holds."""

    floor = -2.0

    def score(self, row):
        raise row.columns["error"]


@dataclass(frozen=True, slots=True)
class Chars(Rule):
    """The number of characters."""

    def score(self, row):
        return Verdict(float(len(row.text)))


REPORT = {"value": 1.0, "status": "ok", "detail": "", "ms": 0.1, "retire": False, "imported": [], "seal": "a1"}


class Unshowable(Exception):
    def __str__(self):
        raise ValueError


def row(text="", **columns):
    return Row(None, text, None, columns)


@pytest.fixture
def streams():
    ends = [wire.Stream(sock) for sock in socket.socketpair()]
    yield ends
    for end in ends:
        end.sock.close()


def test_frames_arrive_whole_however_they_are_cut(streams):
    here, there = streams
    messages = [[], "x" * 3_000_000, {"row": b"\n"}]
    here.send(b"".join(map(wire.frame, messages)))
    found = []
    while len(found) < 3:
        there.receive()
        found += map(wire.load, there.frames())
        here.flush()
    assert found == messages
    assert not here.outbox


def test_lines_wait_until_they_are_whole_and_one_that_is_too_long_ends_them(streams):
    here, there = streams
    for sent, whole in ((b'"a"\n"b', [b'"a"']), (b'"\n', [b'"b"'])):
        here.send(sent)
        there.receive()
        assert list(there.lines()) == whole
    here.send(b'"a"\n"b"\n' + b"0" * (wire.LARGEST_LINE_BYTES + 1))
    there.receive()
    lines = there.lines()
    assert [next(lines), next(lines)] == [b'"a"', b'"b"']
    with pytest.raises(ValueError, match="a line of at least"):
        next(lines)


def test_the_largest_detail_is_a_line():
    report = {"value": -1.5e-300, "status": "s" * 100, "detail": "\U0001f600" * worker.DETAIL_CHARS, "ms": 0.1}
    assert len(wire.line(report)) < wire.LARGEST_LINE_BYTES


def test_a_closed_connection_is_told_by_receive_not_by_send(streams):
    here, there = streams
    there.sock.close()
    here.send(b"lost\n")
    assert here.receive() is False


def test_a_name_of_the_running_script_is_refused_with_advice():
    for module in (b"__main__", b"__mp_main__"):  # the script, and the script in a process that it has spawned
        with pytest.raises(RuleError, match="'Gold' is defined in the script that is being run"):
            wire.load(b"c" + module + b"\nGold\n.")


def test_what_a_rule_raises_decides_its_verdict(subtests):
    ends = {
        ("floor", "too_complex"): (MemoryError(), RecursionError()),
        ("floor", "crashed"): (SystemExit(0), KeyboardInterrupt(), GeneratorExit()),
        (None, "error"): (KeyError("x"), Unshowable()),
    }
    for verdict, error in ((verdict, error) for verdict, errors in ends.items() for error in errors):
        with subtests.test(error=type(error).__name__):
            *found, detail = worker.verdict_of(Raising(), row(error=error), Limits())
            assert (*found,) == verdict
            assert verdict[1] == "too_complex" or type(error).__name__ in detail


def test_a_row_that_does_not_load_is_an_error_of_that_row():
    unread = worker.loaded(b"junk")
    assert worker.verdict_of(Chars(), unread, Limits())[:2] == (None, "error")


def test_anything_else_than_a_report_is_junk(subtests):
    changes = [dict(value=value) for value in (True, "1", [1.0])]
    changes += [dict(status=None), dict(detail=1), dict(ms="1"), dict(retire=0)]
    for junk in (None, [], 1.0, {}, "value", *(REPORT | change for change in changes)):
        with subtests.test(junk=junk), pytest.raises(supervision.JUNK):
            supervision.checked(junk)


def test_a_reports_texts_are_cut():
    report = supervision.checked(REPORT | {"status": "s" * 10**6, "detail": "d" * 10**6})
    assert len(report["status"]) == len(report["detail"]) == worker.DETAIL_CHARS


def test_rows_have_no_value_when_workers_do_not_start(streams, monkeypatch):
    def refuse(*arguments):
        raise OSError("no more processes")

    here, there = streams
    monkeypatch.setattr(supervision, "fork_worker", refuse)
    server = server_module.ForkServer(there, Limits(workers=1), trainer=0)
    rows = [(0, 0, b""), (1, 0, b"")]
    server.take({"batch": 7, "path": [], "rules": [pickle.dumps(Chars())], "rows": rows})
    for _ in range(supervision.LEAST_FAILURES):
        server.retry_at = 0.0
        server.deal()
    there.flush()
    here.receive()
    reports = [json.loads(data) for data in here.lines()]
    assert [(report["row"], report["value"], report["status"]) for report in reports] == [
        (0, None, "infra_error"),
        (1, None, "infra_error"),
    ]
    assert all(report["machine"] and "no more processes" in report["detail"] for report in reports)


def test_a_request_sends_each_rule_once_and_each_row_by_itself():
    rule, other = Chars(), Chars(name="other")
    request = packed([(rule, row("a")), (other, row("b")), (rule, row("c"))], Future())
    assert [pickle.loads(data) for data in request.rules] == [rule, other]
    assert [place for place, _ in request.rows] == [0, 1, 0]
    assert [pickle.loads(data).text for _, data in request.rows] == ["a", "b", "c"]


def test_a_stopped_row_gets_the_floor_of_its_own_rule():
    request = packed([(Chars(), row()), (Raising(), row())], Future())
    stopped = {"value": "floor", "status": "timeout", "detail": "", "ms": 1.0, "machine": False}
    assert [request.take({"row": index, **stopped}) for index in (1, 0)] == [False, True]
    assert [request.judged[index].verdict.value for index in (0, 1)] == [0.0, -2.0]


def test_what_the_machine_fails_has_no_value_and_is_counted():
    request = packed([(Chars(), row()), (Chars(), row())], Future())
    request.take({"row": 0, "value": 1.0, "status": "ok", "detail": "", "ms": 1.0, "machine": False})
    request.fail("no machine")
    assert [judged.verdict for judged in request.judged.values()] == [
        Verdict(1.0),
        Verdict(None, "infra_error", "no machine"),
    ]
    assert [judged.failed for judged in request.judged.values()] == [False, True]


def test_elsewhere_than_on_linux_rules_run_in_place_and_a_warning_says_so_once(monkeypatch, recwarn):
    monkeypatch.setattr(sys, "platform", "darwin")
    pool.supported.cache_clear()
    with WorkerPool() as workers:
        tasks = [(Chars(), row("abc")), (Raising(), row(error=KeyError("x")))]
        for _ in range(2):
            good, bad = workers.run(tasks)
    assert good == Verdict(3.0)
    assert (bad.value, bad.status) == (None, "error")
    assert ["Workers need Linux" in str(warning.message) for warning in recwarn] == [True]


def test_equal_limits_share_a_pool():
    assert shared_pool(Limits(cpu_s=7)) is shared_pool(Limits(cpu_s=7))
    assert shared_pool(Limits(cpu_s=7)) is not shared_pool(Limits(cpu_s=8))


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

"""Processes: when they start, what they are, and that none is left."""

import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from blowups import LIMITS, STOPPED, Blowup, marked_processes
from plain_rules import Begun, Chars, Environment, Sleepy, row, wait_until

from tests.conftest import ROOT
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool

SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from plain_rules import Chars, Sleepy, row
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool
print("the script runs", flush=True)
pool = WorkerPool(Limits(workers=2))
pool.run([(Chars(), row())] * 64)
"""


@pytest.fixture
def pool():
    with WorkerPool(Limits(workers=2, chunk=1)) as pool:
        yield pool


def script(folder, rest):
    """Start a script that has a pool with two workers and then does `rest`."""
    path = folder / "train.py"
    path.write_text(SCRIPT.format(paths=[str(ROOT), str(ROOT / "tests" / "workers")]) + rest)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


def server_of(mark):
    """The fork server: the one marked process whose parent is this one."""
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in marked_processes(mark)
    }
    return next(pid for pid, parent in parents.items() if parent == os.getpid())


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_nothing_starts_before_the_first_row(mark):
    with WorkerPool():
        assert marked_processes(mark) == set()


def test_a_worker_is_light_without_gpu_first_to_go_and_leads_its_session(pool):
    assert pool.run([(Environment(), row())])[0].detail == repr(
        {"heavy": [], "gpus": "", "oom": "1000", "leader": True}
    )


def test_workers_are_kept_between_calls(pool):
    first = {verdict.value for verdict in pool.run([(Environment(), row())] * 50)}
    assert {verdict.value for verdict in pool.run([(Environment(), row())] * 50)} <= first


def test_close_leaves_no_process_and_a_later_call_starts_anew(none_left):
    pool = WorkerPool(Limits(workers=1))
    pool.run([(Chars(), row())])
    pool.close()
    assert none_left() == set()
    assert pool.run([(Chars(), row("ab"))])[0].value == 2.0
    pool.close()


def test_a_pool_that_nobody_holds_leaves_no_process(none_left):
    WorkerPool(Limits(workers=1)).run([(Chars(), row())])
    gc.collect()
    assert none_left() == set()


def test_rows_under_way_when_the_pool_is_closed_have_no_value(tmp_path):
    pool, begun = WorkerPool(Limits(workers=1, wall_s=3600)), tmp_path / "begun"
    future = pool.submit([(Chars(), row("")), (Begun(), row(str(begun)))])
    wait_until(begun.exists)
    pool.close()
    assert [judged.verdict.status for judged in future.result(timeout=120)] == ["ok", "infra_error"]


def test_the_thread_that_started_the_workers_may_end(pool):
    thread = threading.Thread(target=lambda: pool.run([(Environment(), row())] * 20))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert pool.run([(Chars(), row("ab"))])[0].value == 2.0
    assert pool.restarts == 0


def test_a_pool_pickles_as_its_limits(pool):
    pool.run([(Chars(), row())])
    with pickle.loads(pickle.dumps(pool)) as copy:
        assert copy.limits == pool.limits
        assert copy.run([(Chars(), row("ab"))])[0].value == 2.0


def test_a_forked_process_gets_workers_of_its_own(pool, none_left):
    pool.run([(Chars(), row())])
    # A library that another test has imported may have taken the signal by which a pool ends its processes.
    ends = dict(initializer=signal.signal, initargs=(signal.SIGTERM, signal.SIG_DFL))
    with multiprocessing.get_context("fork").Pool(1, **ends) as forked:
        assert forked.apply(lengths_in, (pool, "abc")) == 3.0
    assert pool.run([(Chars(), row("ab"))])[0].value == 2.0


def lengths_in(pool, text):
    return pool.run([(Chars(), row(text))])[0].value


def test_a_server_that_is_killed_is_replaced_and_no_row_is_lost(mark, pool):
    pool.run([(Chars(), row())])
    future = pool.submit([(Sleepy(), row("0.05"))] * 20)
    time.sleep(0.1)
    os.kill(server_of(mark), signal.SIGKILL)
    assert {judged.verdict.status for judged in future.result(timeout=120)} == {"ok"}


def test_a_worker_that_something_else_kills_costs_no_row_its_verdict(mark, pool):
    pool.run([(Chars(), row())])
    future = pool.submit([(Sleepy(), row("0.1"))] * 10)
    time.sleep(0.1)
    for pid in marked_processes(mark) - {server_of(mark)}:
        os.kill(pid, signal.SIGKILL)
    assert {judged.verdict.status for judged in future.result(timeout=120)} == {"ok"}


def test_a_machine_that_starts_no_process_gives_no_values(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with WorkerPool(Limits(workers=1)) as pool:
        verdict = pool.run([(Chars(), row())])[0]
    assert (verdict.value, verdict.status) == (None, "infra_error")
    assert "/nowhere/python" in verdict.detail


def test_a_script_runs_once_and_its_workers_end_with_it(tmp_path, none_left):
    process = script(tmp_path, "pool.submit([(Sleepy(), row('3600'))])\n")
    assert process.communicate(timeout=120)[0] == "the script runs\n"
    assert none_left() == set()


def test_workers_die_with_a_trainer_that_is_killed(tmp_path, mark, none_left):
    process = script(tmp_path, "pool.run([(Sleepy(), row('3600'))] * 4)\n")
    process.stdout.readline()
    wait_until(lambda: len(marked_processes(mark)) >= 3)
    process.kill()
    process.wait()
    process.stdout.close()
    assert none_left() == set()


def test_the_trainers_memory_stays_flat_over_a_hundred_blowups(none_left):
    names = [name for name in STOPPED if name in ("allocate", "exit", "kill", "segfault", "junk", "close_files")]
    with WorkerPool(LIMITS) as pool:
        pool.run((Blowup(), row(name)) for name in names)
        before = resident_mib()
        verdicts = pool.run((Blowup(), row(names[index % len(names)])) for index in range(100))
        grown = resident_mib() - before
    assert {verdict.value for verdict in verdicts} == {-1.0}
    assert grown < 5
    assert none_left() == set()

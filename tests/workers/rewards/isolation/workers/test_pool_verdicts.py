"""What a call gives: every row's own verdict, whatever happens to the others."""

import math
import multiprocessing
import threading
from dataclasses import dataclass

import pytest
from blowups import LIMITS, Blowup
from plain_rules import Busy, Chars, Faulty, Sleepy, Unloadable, Warm, row

from trl_ext.errors import DataError, RuleError
from trl_ext.rewards.base.rule import Rule, Verdict
from trl_ext.rewards.isolation.workers.limits import Limits, available_cpus
from trl_ext.rewards.isolation.workers.pool import WorkerPool

# Of every kind of end, and rows that are judged.
REPEATED = ["spin", "sleep", "regex", "threads", "allocate", "recurse", "exit", "kill", "junk", *map(str, range(40))]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(Limits(cpu_s=0.5, workers=2, memory_mib=256)) as pool:
        yield pool


def spin_for_ever():
    while True:
        pass


def test_verdicts_come_in_the_order_of_the_rows(pool):
    texts = ["x" * (index % 37) for index in range(300)]
    assert [verdict.value for verdict in pool.run((Chars(), row(text)) for text in texts)] == [*map(len, texts)]
    assert pool.run([]) == []


def test_any_text_reaches_the_rule_and_comes_back(pool):
    for text in ("", "\ud800 alone", "a\0b", "\r\n\u2028\u0085", "\U0001f600" * 3000, "x" * 10**6):
        verdict = pool.run([(Chars(), row(text))])[0]
        assert (verdict.value, verdict.detail) == (len(text), text[:4000])


def test_values_come_back_bit_for_bit_and_nan_for_the_caller_to_refuse(pool):
    for text in ("0.1", "1e308", "-0.0", "inf", "5e-324"):
        assert pool.run([(Faulty(), row(text))])[0].value.hex() == float(text).hex()
    assert math.isnan(pool.run([(Faulty(), row("nan"))])[0].value)


def test_an_exception_is_data_with_its_place(pool):
    good, bad, none = pool.run([(Faulty(), row("1")), (Faulty(), row("raise")), (Faulty(), row("none"))])
    assert good == Verdict(1.0)
    assert (bad.value, bad.status) == (None, "error")
    assert bad.detail.startswith("KeyError: 'a bug' (plain_rules.py line ")
    assert "Traceback" in bad.detail
    assert "score() returned None, not a Verdict" in none.detail


def test_several_rules_go_in_one_call_and_later_ones_reach_workers_that_are_there(pool):
    tasks = [(Chars(), row("abc")), (Faulty(), row("5")), (Chars(weight=2.0), row("ab"))]
    assert [verdict.value for verdict in pool.run(tasks)] == [3.0, 5.0, 2.0]
    assert pool.run([(Chars(name="other"), row("abcd"))])[0].value == 4.0


def test_a_rule_is_warmed_up_where_its_workers_come_from(pool):
    assert pool.run([(Warm(), row())])[0].value == 1.0


def test_a_rule_of_the_running_script_or_notebook_goes_by_value(pool):
    @dataclass(frozen=True, slots=True)
    class Local(Rule):
        factor: float = 3.0

        def score(self, row):
            return Verdict(self.factor * len(row.text))

    assert pool.run([(Local(), row("ab"))])[0].value == 6.0


def test_a_rule_or_row_that_does_not_load_or_pickle_is_refused_with_the_reason(pool):
    with pytest.raises(RuleError, match="a_module_that_is_not_there"):
        pool.run([(Unloadable(), row())])
    assert pool.run([(Chars(), row("abc"))])[0].value == 3.0
    rule = Chars()
    object.__setattr__(rule, "gate", threading.Lock())
    with pytest.raises(RuleError, match="'chars' cannot be sent to a worker"):
        pool.run([(rule, row())])
    with pytest.raises(DataError, match="Row 1 cannot be sent"):
        pool.run([(Chars(), row()), (Chars(), row(lock=threading.Lock()))])


def test_calls_from_many_threads_do_not_mix(pool):
    found = {}

    def judge(size):
        found[size] = [verdict.value for verdict in pool.run([(Chars(), row("x" * size))] * 50)]

    threads = [threading.Thread(target=judge, args=(size,)) for size in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {size: [float(size)] * 50 for size in range(8)}


def test_a_rule_may_use_all_but_its_limit_and_the_rest_of_a_stopped_rows_chunk_is_judged(pool):
    assert [verdict.status for verdict in pool.run([(Busy(), row("0.25")), (Busy(), row("60"))])] == ["ok", "timeout"]
    with WorkerPool(Limits(cpu_s=0.2, workers=1, chunk=16)) as alone:
        texts = ["0", "60", *["0"] * 40, "60", "0"]
        statuses = [verdict.status for verdict in alone.run((Busy(), row(text)) for text in texts)]
    assert statuses == ["timeout" if text == "60" else "ok" for text in texts]


def test_verdicts_are_the_same_in_three_repeats_and_with_all_cores_busy():
    context = multiprocessing.get_context("spawn")
    calls = []
    with WorkerPool(LIMITS) as pool:
        for busy in (0, 0, 4):
            others = [context.Process(target=spin_for_ever, daemon=True) for _ in range(busy)]
            for other in others:
                other.start()
            verdicts = pool.run((Blowup(), row(text)) for text in REPEATED)
            calls.append([(verdict.value, verdict.status) for verdict in verdicts])
            for other in others:
                other.kill()
                other.join()
    assert calls[0] == calls[1] == calls[2]


def test_a_slow_row_on_a_full_machine_is_not_taken_for_a_sleeping_one():
    """Six busy workers per processor: each takes six times its processor time."""
    workers = 6 * available_cpus()
    with WorkerPool(Limits(cpu_s=0.3, wall_s=0.4, workers=workers, chunk=1)) as pool:
        assert {verdict.status for verdict in pool.run([(Busy(), row("0.15"))] * workers)} == {"ok"}


def test_when_a_calls_time_is_up_rows_that_never_began_have_no_value():
    with WorkerPool(Limits(cpu_s=5, wall_s=30, batch_s=2, workers=1, chunk=1)) as pool:
        pool.run([(Chars(), row())])
        running, waiting = pool.run([(Sleepy(), row("0.01")), (Sleepy(), row("3600")), (Sleepy(), row("0"))])[1:]
    assert (running.value, running.status) == (-1.0, "timeout")
    assert (waiting.value, waiting.status) == (None, "infra_error")


def test_rows_that_stopped_rows_starved_do_not_count_as_failed():
    with WorkerPool(Limits(cpu_s=0.2, batch_s=0.5, workers=1, chunk=1)) as pool:
        pool.run([(Chars(), row())])
        found = pool.submit([(Busy(), row("60"))] * 30).result()
    assert {judged.verdict.status for judged in found} == {"timeout", "infra_error"}
    assert not any(judged.failed for judged in found)


def test_rows_of_a_machine_that_is_too_slow_count_as_failed():
    with WorkerPool(Limits(cpu_s=0.2, wall_s=5, batch_s=0.5, workers=1, chunk=1)) as pool:
        found = pool.submit([(Sleepy(), row("0.1"))] * 60).result()
    assert sum(judged.failed for judged in found) > 20


def test_restarts_are_counted_and_each_row_is_timed():
    with WorkerPool(Limits(cpu_s=0.2, workers=1)) as pool:
        short, stopped = pool.submit([(Busy(), row("0")), (Busy(), row("60"))]).result()
    assert (short.verdict.status, stopped.verdict.status, pool.restarts) == ("ok", "timeout", 1)
    assert short.ms < stopped.ms
    assert stopped.ms > 190  # a processor's clock counts in ticks of some milliseconds, and ends a row a tick early

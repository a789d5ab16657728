"""Programs that sleep run beside others, programs that compute wait for their turn; waiting reaches no limit."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.isolation.sandbox import api
from trl_ext.rewards.rules.code import Code

COMPUTES = (
    "import time\nstart = time.monotonic()\nwhile time.process_time() < 0.2: pass\nprint(start, time.monotonic())"
)
# How contest programs raise the recursion limit: the main thread only waits for another.
IN_A_THREAD = (
    "import threading, time\ndef main():\n    while time.process_time() < 0.35: pass\n    print(1)\n"
    "threading.Thread(target=main).start()"
)


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    """One program computes at a time, as on two processors."""
    monkeypatch.setattr(api, "_computing", threading.Semaphore(1))


def statuses(codes: list[str], cpu_s: float) -> list[str]:
    rows = [Row(None, f"```python\n{code}\n```", None, {"tests": [{"input": "", "output": "1"}]}) for code in codes]
    return [f"{verdict.value:g} {verdict.status}" for verdict in Code(cpu_s=cpu_s).score_batch(rows)]


def test_programs_that_sleep_overlap():
    started = time.monotonic()
    assert statuses(["import time\ntime.sleep(1)\nprint(1)"] * 16, cpu_s=1.0) == ["1 ok"] * 16
    assert time.monotonic() - started < 10  # One behind the other they take 16.


def test_programs_that_compute_do_not_overlap():
    limits = api.JobLimits(1.0, 256, 1024)
    with ThreadPoolExecutor(6) as threads:
        outcomes = threads.map(lambda _: api.run_program(COMPUTES.encode(), b"", limits), range(6))
        spans = sorted(tuple(map(float, outcome.output.split())) for outcome in outcomes)
    beside = [sum(start < other < end for other, _ in spans) for start, end in spans]
    assert max(beside) <= 2, beside  # A crowded machine makes a program look asleep now and then.


def test_a_place_that_a_sleeper_gave_away_costs_no_program_its_time():
    sleeps_first = "import time\ntime.sleep(0.05)\nwhile time.process_time() < 0.35: pass\nprint(1)"
    assert statuses([IN_A_THREAD, sleeps_first] * 6, cpu_s=0.5) == ["1 ok"] * 12
    endless = "import time\ntime.sleep(0.05)\nwhile True: pass"
    assert statuses([endless, "print(1)"] * 4, cpu_s=0.3) == ["0 timeout", "1 ok"] * 4


def test_no_server_is_left_once_they_are_closed():
    statuses(["import time\ntime.sleep(0.3)\nprint(1)"] * 4, cpu_s=1.0)
    servers = [server.process.pid for server in api._idle]
    assert len(servers) > 1 and all(Path(f"/proc/{pid}").exists() for pid in servers)
    api._close_all()
    assert not [pid for pid in servers if Path(f"/proc/{pid}").exists()]

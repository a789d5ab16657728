"""The phase clock: no second is lost, none counts twice."""

import pytest

from trl_ext.monitor import phases
from trl_ext.monitor.phases import PhaseClock


class FakeTime:
    """Stands in for the `time` module inside phases.py: seconds pass only when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s

    def pass_s(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock_time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(phases, "time", fake)
    return fake


def test_a_nested_phase_takes_its_seconds_from_the_outer_one_and_one_in_itself_counts_once(clock_time):
    clock = PhaseClock()
    with clock.phase("generate"):
        clock_time.pass_s(1)
        with clock.phase("logps"):
            clock_time.pass_s(2)
        clock_time.pass_s(4)
    assert clock.take() == {"generate": 5.0, "logps": 2.0}
    clock = PhaseClock()
    with clock.phase("update"), clock.phase("update"):
        clock_time.pass_s(3)
    assert clock.take() == {"update": 3.0}


def test_time_between_phases_goes_to_outside_or_is_dropped(clock_time):
    clock = PhaseClock(outside="other")
    clock_time.pass_s(50)  # before the first phase: set-up, not a step
    with clock.phase("generate"):
        clock_time.pass_s(1)
    clock_time.pass_s(2)
    with clock.phase("update"):
        clock_time.pass_s(4)
    clock_time.pass_s(8)
    assert clock.take() == {"generate": 1.0, "other": 10.0, "update": 4.0}
    clock = PhaseClock()
    with clock.phase("generate"):
        clock_time.pass_s(1)
    clock_time.pass_s(2)
    assert clock.take() == {"generate": 1.0}


def test_take_resets_leaves_an_open_phase_open_and_does_not_start_the_clock(clock_time):
    clock = PhaseClock()
    with clock.phase("update"):
        clock_time.pass_s(1)
        assert clock.take() == {"update": 1.0}
        clock_time.pass_s(2)
    assert clock.take() == {"update": 2.0}
    assert clock.take() == {}
    clock = PhaseClock(outside="other")
    assert clock.take() == {}
    clock_time.pass_s(5)
    with clock.phase("score"):
        clock_time.pass_s(1)
    assert clock.take() == {"score": 1.0, "other": 0.0}


def test_an_exception_closes_its_phase_and_sync_runs_before_every_reading(clock_time):
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.phase("score"):
        clock_time.pass_s(1)
        raise KeyError
    clock_time.pass_s(9)
    assert clock.take() == {"score": 1.0}
    clock = PhaseClock(sync=lambda: clock_time.pass_s(1))  # a kernel still in flight for one second
    with clock.phase("logps"):
        pass
    assert clock.take() == {"logps": 1.0}


def test_a_phase_within_one_of_its_name_waits_for_no_kernel(clock_time):
    """A forward of the update opens `update` within `update`; each reading of the clock would stop a card twice."""
    syncs = []
    clock = PhaseClock(sync=lambda: syncs.append(clock_time.pass_s(1)))
    with clock.phase("update"):
        for _ in range(3):
            with clock.phase("update"):
                clock_time.pass_s(2)
    assert len(syncs) == 2
    assert clock.take() == {"update": 7.0}

"""The audit on a made-up card: whose a peak is, what is logged, what is said once, and the table at the end."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tests.fake_card import FakeCard
from trl_ext.memory.formulas.peak import PHASE_WORDS
from trl_ext.memory.units import GIB
from trl_ext.monitor.card_memory import MemoryAudit, MemoryMeter, MemoryWatch, Reading, source_of
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.report import summary_table
from trl_ext.monitor.phases import PhaseClock
from trl_ext.monitor.summary import MEMORY_HEADER, memory_rows, summarize

PHASES = ("generate", "score", "update", "step")
PREDICTED = {"generate": 10 * GIB, "score": 8 * GIB, "update": 16 * GIB, "step": 12 * GIB, "weight_push": 20 * GIB}
KEYS = {f"memory/{key}" for key in (*(f"{phase}_gib" for phase in PHASES), "reserved_gib", "free_share")}
KEYS |= {"memory/alloc_retries"}


def metered():
    card = FakeCard()
    meter, clock = MemoryMeter(card, PHASES), PhaseClock(outside="other")
    meter.start()
    clock.on_charge = meter.charge
    return card, meter, clock


def one_step(card, clock, update: float = 8.0) -> None:
    with clock.phase("generate"):
        card.allocate(4)
        with clock.phase("logps"):
            card.allocate(5)
        card.allocate(3)
    with clock.phase("update"):
        card.allocate(update)


def peaks(meter) -> dict:
    return {phase: peak / GIB for phase, peak in meter.take().peak_bytes.items()}


def reading(update: float = 8.0, free: float = 0.5, retries: float = 0.0, **others: float) -> Reading:
    gibs = {"generate": 4.0, "score": 5.0, "update": update, "step": 6.0} | others
    return Reading({phase: value * GIB for phase, value in gibs.items()}, 18 * GIB, free, retries)


def audit(predicted=PREDICTED):
    said: list[str] = []
    return MemoryAudit(predicted, PHASE_WORDS, lambda: "set this lower.", said.append), said


# Whose a peak is ----------------------------------------------------------------------------------------------------


def test_a_peak_belongs_to_the_innermost_phase_and_logps_to_the_plans_score():
    card, meter, clock = metered()
    one_step(card, clock)
    assert peaks(meter) == {"generate": 4.0, "score": 5.0, "update": 8.0, "step": 0.0}


def test_a_phase_keeps_its_highest_peak_until_it_is_read_and_its_last_one_while_it_does_not_run():
    card, meter, clock = metered()
    one_step(card, clock, update=8)
    one_step(card, clock, update=7)
    assert peaks(meter)["update"] == 8.0
    # Several optimizer steps on the same completions: the keys of a log entry stay the same.
    with clock.phase("update"):
        card.allocate(7)
    assert peaks(meter) == {"generate": 4.0, "score": 5.0, "update": 7.0, "step": 0.0}


def test_what_was_allocated_before_the_start_and_evaluation_are_in_no_phase_of_the_plan():
    card = FakeCard()
    meter, clock = MemoryMeter(card, PHASES), PhaseClock()
    clock.on_charge = meter.charge
    card.allocate(20)
    meter.start()
    one_step(card, clock)
    assert max(peaks(meter).values()) == 8.0
    card, meter, clock = metered()
    one_step(card, clock)
    with clock.phase("evaluate", whole=True):
        card.allocate(15)
    taken = meter.take()
    assert max(taken.peak_bytes.values()) == 8 * GIB
    assert taken.reserved_bytes == 15 * GIB


def test_retries_are_those_since_the_last_reading():
    card, meter, _ = metered()
    card.retries = 3
    assert meter.take().num_retries == 3
    card.retries = 4
    assert meter.take().num_retries == 1


def test_the_worst_rank_is_logged():
    other = [9 * GIB, 1.0, 1.0, 1.0, 20 * GIB, 0.9, 2.0]
    worst = reading(free=0.5).over(lambda numbers: [max(pair) for pair in zip(numbers, other, strict=True)])
    assert worst.peak_bytes == {"generate": 9 * GIB, "score": 5 * GIB, "update": 8 * GIB, "step": 6 * GIB}
    assert (worst.reserved_bytes, worst.num_retries) == (20 * GIB, 2.0)
    assert worst.free_frac == pytest.approx(0.1)


# Metrics ------------------------------------------------------------------------------------------------------------


def test_metrics_are_gib_and_shares_and_the_error_is_that_of_the_plans_worst_phase_that_is_measured():
    gibs = {"memory/generate_gib": 4.0, "memory/score_gib": 5.0, "memory/update_gib": 8.0, "memory/step_gib": 6.0}
    others = {"memory/reserved_gib": 18.0, "memory/free_share": 0.5, "memory/alloc_retries": 0.0}
    assert audit(None)[0].metrics(reading()) == gibs | others
    assert audit()[0].metrics(reading(update=12))["memory/error_pct"] == pytest.approx(-25.0)


def test_predictions_come_once_and_all_other_keys_with_every_entry():
    subject, _ = audit()
    first, second = (subject.metrics(reading()) for _ in range(2))
    predicted = {f"memory/predicted_{phase}_gib" for phase in PHASES}
    assert set(first) == KEYS | predicted | {"memory/error_pct"}
    assert set(second) == KEYS | {"memory/error_pct"}
    assert first["memory/predicted_update_gib"] == 16.0


def test_there_is_nothing_to_read_on_the_cpu():
    assert source_of(torch.device("cpu")) is None


# Warnings -----------------------------------------------------------------------------------------------------------


def test_more_than_predicted_is_said_once_with_both_numbers():
    subject, said = audit()
    for _ in range(3):
        subject.metrics(reading(update=17.4))
    assert said == [
        "Memory in forward and backward is 17.4 GiB and 16.0 were predicted (+8.7%). Do not count on the plan's "
        "reserve: set this lower."
    ]


def test_five_percent_more_than_predicted_is_tolerated_and_less_is_fine():
    for update, count in ((16.7, 0), (16.9, 1), (3.0, 0)):
        subject, said = audit()
        subject.metrics(reading(update=update))
        assert len(said) == count


def test_allocator_retries_are_said_once():
    subject, said = audit(None)
    for retries in (0, 2, 1):
        subject.metrics(reading(retries=retries))
    assert len(said) == 1 and said[0].startswith("The allocator emptied its cache 2 times to find room")


# In a Trainer -------------------------------------------------------------------------------------------------------


class Engine:
    """Steps within backward, as DeepSpeed's."""

    def __init__(self, card):
        self.card = card

    def step(self):
        self.card.allocate(11)


def watch(stepper):
    card, meter, clock = metered()
    noted: dict[str, float] = {}
    callback = MemoryWatch(
        meter, audit(None)[0], clock, lambda numbers: numbers, lambda: [stepper(card)], noted.__setitem__
    )
    callback.on_train_begin(None, None, None)
    return card, clock, callback, noted


def test_an_engines_step_within_backward_is_a_phase_of_its_own():
    engines = []
    card, clock, callback, noted = watch(lambda card: engines.append(Engine(card)) or engines[0])
    with clock.phase("update"):
        card.allocate(8)
        engines[0].step()
        card.allocate(7)
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    assert (noted["memory/update_gib"], noted["memory/step_gib"]) == (8.0, 11.0)
    callback.on_train_end(None, None, None)
    assert "step" not in vars(engines[0])


class Greedy(torch.optim.SGD):
    """Makes its state when it steps, as Adam does."""

    def step(self, closure=None):
        self.card.allocate(11)


def test_a_torch_optimizers_step_is_a_phase_of_its_own():
    optimizer = Greedy([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    card, clock, callback, noted = watch(lambda card: vars(optimizer).update(card=card) or optimizer)
    with clock.phase("update"):
        card.allocate(8)
    card.allocate(9)  # between the phases: clipping
    optimizer.step()
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    assert (noted["memory/update_gib"], noted["memory/step_gib"]) == (8.0, 11.0)
    callback.on_train_end(None, None, None)
    optimizer.step()
    assert card.top == 11.0, "the meter went on after the end of training"


def test_only_steps_that_are_logged_are_read():
    """Reading asks all ranks."""
    card, clock, callback, noted = watch(Engine)
    one_step(card, clock, update=9)
    callback.on_step_end(None, None, SimpleNamespace(should_log=False))
    assert not noted
    one_step(card, clock, update=8)
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    assert noted["memory/update_gib"] == 9.0


# The table ----------------------------------------------------------------------------------------------------------

FIRST = {"memory/update_gib": 15.0, "memory/step_gib": 12.3, "memory/reserved_gib": 18.0, "memory/free_share": 0.2}
FIRST |= {"memory/predicted_update_gib": 16.0, "memory/error_pct": -6.25}
HISTORY = [
    {"step": 1, "reward": 0.1, **FIRST},
    {"step": 2, "reward": 0.2, "memory/update_gib": 16.8, "memory/step_gib": 12.1, "memory/reserved_gib": 18.0},
]


def test_the_table_holds_the_highest_peak_of_the_run_beside_the_prediction():
    assert memory_rows(HISTORY) == [MEMORY_HEADER, ["update", "16.0", "16.8", "+5.0%"], ["step", "-", "12.3", "-"]]


def test_the_run_ends_on_the_table():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(summary_table(summarize(HISTORY)))
    lines = [line.split() for line in console.export_text().splitlines() if "+5.0%" in line or "predicted GiB" in line]
    assert len(lines) == 2 and lines[1] == ["update", "16.0", "16.8", "+5.0%"]


def test_the_report_has_the_table_where_memory_was_measured():
    html = report_page(HISTORY, RunFacts())
    assert "<h2>Memory</h2>" in html
    assert "<td>16.8</td><td>+5.0%</td>" in html
    assert memory_rows([{"step": 1, "reward": 0.1}]) == []
    assert "<h2>Memory</h2>" not in report_page([{"step": 1, "reward": 0.1}], RunFacts())

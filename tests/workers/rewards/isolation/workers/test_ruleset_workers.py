"""A RuleSet whose rules run in workers: the same verdicts, each different row once, and only bad rows pay."""

import logging
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Limits, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.isolation.workers.pool import WorkerPool
from trl_ext.rewards.isolation.workers.wire import ImageReference

LIMITS = Limits(cpu_s=0.3, wall_s=0.6, workers=2)


@dataclass(frozen=True, kw_only=True)
class Words(Rule):
    """The number of words; what the text asks for otherwise."""

    def score(self, row: Row) -> Verdict:
        if row.text == "hang":
            time.sleep(3600)
        if row.text == "exit":
            os._exit(1)
        if row.text == "away":
            return Verdict(None, "infra_error", "no host")
        if row.text == "raise":
            raise KeyError("gold")
        return Verdict(float(len(row.text.split())))


@dataclass(frozen=True, kw_only=True)
class Keyed(Words):
    """The same, remembered by text, with the process that judged in the detail."""

    def cache_key(self, row: Row):
        return row.text

    def score(self, row: Row) -> Verdict:
        return Verdict(float(len(row.text.split())), "ok", f"{time.monotonic_ns()}")


@dataclass(frozen=True, kw_only=True)
class UnaskedGroup(Rule):
    """The size of the group."""

    def score(self, row: Row) -> Verdict:
        return Verdict(float(1 + len(row.group)))


@dataclass(frozen=True, kw_only=True)
class GroupSize(UnaskedGroup):
    """The same, and the class says what it reads."""

    reads_group = True


@dataclass(frozen=True, kw_only=True)
class Pictured(Rule):
    """The size of the row's image as the row has it, and as its file has it."""

    columns = ("image",)

    def score(self, row: Row) -> Verdict:
        image = row.columns["image"]
        if not isinstance(image, ImageReference):
            return Verdict(1.0, "ok", "the image itself")
        try:
            return Verdict(1.0, "ok", f"{image.size} read {image.open().size}")
        except RuleError as error:
            return Verdict(0.0, "ok", str(error))


def test_the_totals_are_those_without_workers():
    texts = [" ".join(["w"] * n) for n in range(40)]
    isolated, inline = (RuleSet([Words(), Answer(name="right")], limits=LIMITS, isolate=i) for i in (True, False))
    answers = dict(answer=["1"] * 40)
    totals = inline(completions=texts, **answers)
    assert isolated(completions=texts, **answers) == totals
    isolated.close()
    assert isolated(completions=texts, **answers) == totals, "a closed set starts again"


def test_only_the_bad_rows_pay(caplog):
    metrics: dict[str, float] = {}
    rules = RuleSet([Words()], limits=LIMITS)
    found = rules(completions=["a b", "hang", "exit", "a b c"], log_metric=metrics.__setitem__)
    assert found == [2.0, 0.0, 0.0, 3.0]
    assert metrics["rules/words/timeout_frac"] == 0.5
    assert rules.explain("", "hang").parts[0].status == "timeout"
    assert rules.explain("", "exit").parts[0].status == "crashed"


def test_an_exception_in_a_worker_stops_with_its_traceback_or_is_the_floor(caplog):
    with pytest.raises(RuleError, match=r"(?s)Rule 'words' raised \(row 1, .*KeyError.*gold"):
        RuleSet([Words()], limits=LIMITS)(completions=["a", "raise"])
    rules = RuleSet([Words(name="going_on")], limits=LIMITS, on_error="floor")
    assert rules(completions=["a", "raise", "a b"]) == [1.0, 0.0, 2.0]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_rows_that_are_equal_to_the_rule_are_judged_once():
    metrics: dict[str, float] = {}
    rules = RuleSet([Keyed()], limits=LIMITS)
    rules(completions=["a b"] * 6 + ["a"] * 2, log_metric=metrics.__setitem__)
    assert metrics["rules/keyed/cache_frac"] == 6 / 8
    details = {rules.explain("", "a b").parts[0].detail for _ in range(3)}
    assert len(details) == 1, "judged again"


def test_rows_are_judged_while_the_caller_goes_on(monkeypatch):
    rules, submit, futures = RuleSet([Words()], limits=LIMITS), WorkerPool.submit, []
    monkeypatch.setattr(WorkerPool, "submit", lambda *args: futures.append(submit(*args)) or futures[-1])
    batch = dict(completions=["hang", "a b"])
    rules.start(**batch)
    [judged] = [future.result(timeout=120) for future in futures]
    assert [one.verdict.status for one in judged] == ["timeout", "ok"]
    assert rules(**batch) == [0.0, 2.0]
    assert len(futures) == 1, "judged again"


def test_what_was_started_at_a_step_is_found_at_that_step_and_not_for_other_rows(monkeypatch):
    rules = RuleSet([Words()], limits=LIMITS)
    rules.start(completions=["a b"])
    assert rules(completions=["a b c"]) == [3.0]
    batch = dict(prompts=["p", "p"], completions=["a b", "c"], trainer_state=SimpleNamespace(global_step=3))
    rules.start(**batch)
    monkeypatch.setattr(WorkerPool, "submit", None)
    assert rules(**batch) == [2.0, 1.0]


def test_a_worker_gets_the_group_where_the_rule_asks_for_it():
    batch = dict(prompts=["p", "p", "q"], completions=["a", "b", "c"])
    assert RuleSet([GroupSize()], limits=LIMITS)(**batch) == [2.0, 2.0, 1.0]
    with pytest.raises(RuleError, match="reads_group = True"):
        RuleSet([UnaskedGroup()], limits=LIMITS)(**batch)


def test_an_image_goes_to_a_worker_by_reference(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    images = [Image.open(tmp_path / "a.png"), Image.new("RGB", (30, 20))]
    found = RuleSet([Pictured()], limits=LIMITS).explain_all([None] * 2, ["a", "b"], image=images)
    assert found[0].parts[0].detail == "(30, 20) read (30, 20)"
    assert "has no file" in found[1].parts[0].detail
    assert RuleSet([Pictured()], isolate=False)(completions=["b"], image=images[1:]) == [1.0]


def test_a_machine_that_fails_too_many_rows_stops_this_set_until_it_is_reset():
    rules, batch = RuleSet([Words()], limits=LIMITS), dict(completions=["away"] * 20)
    for _ in range(2):
        with pytest.raises(RuleError, match=r"20 of the last 20 rows of rule 'words' .* no host"):
            rules(**batch)
    assert RuleSet([Words()], limits=LIMITS)(completions=["a b"]) == [2.0]
    rules.reset()
    assert rules(completions=["a b"]) == [2.0]


def test_a_verifier_that_hangs_for_every_row_stops_the_set_and_a_few_hostile_rows_do_not():
    rules = RuleSet([Words()], limits=Limits(cpu_s=0.05, wall_s=0.1, workers=4))
    for _ in range(3):
        assert rules(completions=["hang"] * 7 + ["a b"]) == [0.0] * 7 + [2.0]
    for _ in range(2):
        assert rules(completions=["hang"] * 8) == [0.0] * 8
    with pytest.raises(RuleError, match="'words' gave no verdict in time for any of the last 24 rows, 3 calls"):
        rules(completions=["hang"] * 8)
    with pytest.raises(RuleError, match="'words'"):
        rules(completions=["a b"])
    rules.reset()
    assert rules(completions=["a b"]) == [2.0]


def test_when_the_calls_time_is_up_rows_that_stopped_ones_starved_are_late_as_well():
    rules = RuleSet([Words()], limits=Limits(cpu_s=0.05, wall_s=0.2, workers=1, batch_s=0.5))
    for _ in range(2):
        assert {*rules(completions=["hang"] * 20)} == {0.0, None}
    with pytest.raises(RuleError, match="'words' gave no verdict in time for any of the last 60 rows"):
        rules(completions=["hang"] * 20)

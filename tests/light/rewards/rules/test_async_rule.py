"""Rules that wait: many calls at a time, each failing alone, within bounds; and rules that judge whole batches."""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import AsyncRule, Call, Length, Limits, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.rules import async_rule

TEXTS = [f"text {number}" for number in range(64)]


class Gauge:
    """Counts calls, and the most of them under way at a time."""

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.now = self.most = 0


GAUGE = Gauge()


@pytest.fixture(autouse=True)
def gauge():
    GAUGE.__init__()
    return GAUGE


@dataclass(frozen=True, kw_only=True)
class Judged(AsyncRule):
    """The number of words; fails where the text says so."""

    costs = ("tokens", "usd")

    async def score(self, row: Row) -> Verdict:
        GAUGE.calls[row.text] += 1
        GAUGE.now += 1
        GAUGE.most = max(GAUGE.most, GAUGE.now)
        try:
            await asyncio.sleep(0.005)
            if "hang" in row.text:
                await asyncio.sleep(3600)
            if "away" in row.text or ("once" in row.text and GAUGE.calls[row.text] == 1):
                raise ConnectionError("no host")
            if "bug" in row.text:
                raise TypeError("a mistake")
            if "exit" in row.text:
                raise SystemExit(1)
        finally:
            GAUGE.now -= 1
        self.spend(tokens=10, usd=0.5)
        return Verdict(float(len(row.text.split())))


def wait_for(num_calls: int) -> None:
    """Wait until so many calls are under way."""
    end = time.monotonic() + 5
    while GAUGE.now != num_calls and time.monotonic() < end:
        time.sleep(0.005)
    assert GAUGE.now == num_calls


def metrics_of(rules: RuleSet, **batch) -> tuple[list, dict[str, float]]:
    metrics: dict[str, float] = {}
    return rules(**batch, log_metric=metrics.__setitem__), metrics


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_so_many_calls_as_told_are_under_way_at_a_time(concurrency, gauge):
    assert RuleSet([Judged(concurrency=concurrency)])(completions=TEXTS) == [2.0] * 64
    assert gauge.most == concurrency


def test_a_call_that_fails_or_hangs_costs_its_own_row_only():
    rules = RuleSet([Judged(retries=0), Length(high=9, unit="words", weight=0.1)])
    found = rules.explain_all([""] * 64, [*TEXTS[:63], "away"])
    assert [one.parts[0].value for one in found] == [2.0] * 63 + [None]
    assert found[63].parts[0].status == "infra_error"
    assert found[63].parts[0].detail == "ConnectionError: no host (1 attempt)"
    assert found[63].total == 0.1
    found = RuleSet([Judged(timeout_s=0.02, retries=0)]).explain("", "hang").parts[0]
    assert (found.value, found.status) == (None, "infra_error")
    assert found.detail == "no answer within 0.02 s (1 attempt)"


def test_a_call_is_tried_again_and_counted(gauge):
    values, metrics = metrics_of(RuleSet([Judged()]), completions=["once", "a b", "away"])
    assert values == [1.0, 2.0, None]
    assert gauge.calls == {"once": 2, "a b": 1, "away": 3}
    counts = {"calls": 6, "retries": 3, "tokens": 20, "usd": 1.0, "error_frac": 1 / 3}
    assert {key: metrics[f"rules/judged/{key}"] for key in counts} == counts
    assert metrics["rules/judged/latency_s"] > 0


def test_too_many_failures_end_the_run_until_the_set_is_reset(gauge):
    rules = RuleSet([Judged(retries=0)])
    with pytest.raises(RuleError, match=r"40 of the last 40 rows of rule 'judged' .*no host.*RuleSet.reset\(\)"):
        rules(completions=[f"away {n}" for n in range(40)])
    asked = gauge.calls.total()
    with pytest.raises(RuleError, match="40 of the last 40"):
        rules(completions=["a b"])
    assert gauge.calls.total() == asked, "a set that has stopped asks nobody"
    assert RuleSet([Judged()])(completions=["a b"]) == [2.0], "a new set starts closed"
    rules.reset()
    assert rules(completions=["a b"]) == [2.0]


def test_failures_of_one_rule_are_not_lost_among_the_rows_of_others():
    others = [Length(high=9, name=f"length_{n}") for n in range(30)]
    with pytest.raises(RuleError, match="rule 'judged'"):
        RuleSet([*others, Judged(retries=0, concurrency=4)])(
            completions=[f"away {n}" for n in range(32)], completion_ids=[[1]] * 32
        )


def test_a_batch_that_is_sure_to_end_the_run_is_given_up(gauge):
    with pytest.raises(RuleError):
        RuleSet([Judged(retries=0, concurrency=2)])(completions=[f"away {n}" for n in range(400)])
    assert gauge.calls.total() <= 0.05 * 400 + 3


def test_more_failures_are_borne_where_limits_say_so():
    rules = RuleSet([Judged(retries=0)], limits=Limits(max_infra_frac=1.0))
    assert rules(completions=[f"away {n}" for n in range(40)]) == [None] * 40


@pytest.mark.parametrize(("text", "named"), [("bug", "TypeError: a mistake"), ("exit", "SystemExit")])
def test_a_mistake_in_the_rule_is_not_taken_for_a_failing_call(text, named, gauge):
    with pytest.raises(RuleError, match=rf"(?s)Rule 'judged' raised \(row 1.*{named}.*test_async_rule.py"):
        RuleSet([Judged()])(completions=["a b", text])
    assert gauge.calls[text] == 1
    assert RuleSet([Judged()], on_error="floor")(completions=["a b", text]) == [2.0, 0.0]


def test_equal_rows_are_asked_once_and_kept_unless_they_failed(gauge):
    rules = RuleSet([Judged()])
    for _ in range(2):
        assert rules(completions=["a b", "a b", "c"]) == [2.0, 2.0, 1.0]
    assert gauge.calls == {"a b": 1, "c": 1}
    _, metrics = metrics_of(rules, completions=["a b", "c"])
    assert (metrics["rules/judged/calls"], metrics["rules/judged/cache_frac"]) == (0, 1.0)
    rules = RuleSet([Judged(retries=0)])
    assert [rules(completions=["once"]) for _ in range(2)] == [[None], [1.0]]


def test_rows_that_differ_in_what_a_judge_reads_are_asked_each(gauge):
    @dataclass(frozen=True, kw_only=True)
    class WithColumn(Judged):
        @property
        def columns(self) -> tuple[str, ...]:
            return ("answer",)

    RuleSet([WithColumn()])(prompts=["p", "p", "q"], completions=["a"] * 3, answer=["1", "2", "1"])
    assert gauge.calls["a"] == 3


def has_four_words(row: Row) -> float | None:
    return None if "lost" in row.text else float(len(row.text.split()) >= 4)


def test_a_row_behind_a_shut_gate_costs_no_call(gauge):
    rules = RuleSet([Judged(gate="first", weight=0.1), Call(has_four_words, name="first", isolate=False)])
    texts = ["one two three four", "one", "lost and found", "one two three four five"]
    totals, metrics = metrics_of(rules, completions=texts)
    assert set(gauge.calls) == {texts[0], texts[3]}
    assert totals == pytest.approx([1.4, 0.0, None, 1.5])
    assert metrics["rules/judged/calls"] == 2
    statuses = [explained.parts[0].status for explained in rules.explain_all(None, texts)]
    assert statuses == ["ok", "gated", "gated", "ok"]


def test_a_chain_of_waiting_gates_is_asked_in_its_order(gauge):
    late = Judged(name="late", gate="early", weight=0.0)
    early = Judged(name="early", gate="first", scale=(0, 5), weight=0.0)
    rules = RuleSet([late, early, Call(has_four_words, name="first", isolate=False)])
    rules(completions=["one two three four", "one two three four five", "one"])
    assert gauge.calls == {"one two three four": 1, "one two three four five": 2}


def test_calls_begin_early_and_are_collected_once(gauge):
    rules = RuleSet([Judged()])
    rules.start(completions=["a b"])
    assert rules(completions=["a b"]) == [2.0]
    assert gauge.calls["a b"] == 1


def test_what_was_begun_for_other_rows_is_given_up(gauge):
    rules = RuleSet([Judged()])
    rules.start(completions=["hang"])
    wait_for(1)
    assert gauge.calls["hang"] == 1
    assert rules(completions=["a b"]) == [2.0]
    wait_for(0)


def test_what_still_waits_is_given_up_where_another_rule_raises(gauge):
    class Raises(Rule):
        tier = "inline"

        def score(self, row):
            raise KeyError("gold")

    with pytest.raises(RuleError, match="Rule 'raises' raised"):
        RuleSet([Judged(), Raises()])(completions=["hang"])
    wait_for(0)


def test_a_set_scores_within_a_running_event_loop():
    async def in_a_notebook():
        return RuleSet([Judged()])(completions=["a b"])

    assert asyncio.run(in_a_notebook()) == [2.0]


def test_a_forked_process_has_a_loop_of_its_own():
    assert RuleSet([Judged()])(completions=["a b"]) == [2.0]
    pid = os.fork()
    if not pid:
        os._exit(0 if RuleSet([Judged()])(completions=["a b c"]) == [3.0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_undeclared_cost_is_a_sentence():
    @dataclass(frozen=True, kw_only=True)
    class Priced(AsyncRule):
        async def score(self, row: Row) -> Verdict:
            self.spend(euros=1)
            return Verdict(1.0)

    with pytest.raises(RuleError, match=r"spend\(euros=...\) is not declared. Write costs = \('tokens', 'euros'\)"):
        RuleSet([Priced()])(completions=["a"])


async def slow(row: Row) -> float:
    return 1.0


def test_a_plain_rule_that_is_async_is_refused_with_what_to_derive_from():
    class Plain(Rule):
        async def score(self, row):
            return Verdict(1.0)

    class Awaited(AsyncRule):
        def score(self, row):
            return Verdict(1.0)

    class Empty(AsyncRule):
        pass

    for make, match in (
        (Empty, "Empty is abstract. Give it async def score"),
        (Plain, "Plain and its score.* Derive the class from AsyncRule"),
        (Awaited, "Awaited and its score.* Write async def"),
        (lambda: Call(slow), "slow is async.* AsyncRule"),
    ):
        with pytest.raises(RuleError, match=match):
            make()


@pytest.mark.parametrize(("key", "value"), [("concurrency", 0), ("retries", -1), ("timeout_s", 0), ("timeout_s", "5")])
def test_a_bound_that_cannot_hold_is_refused(key, value):
    with pytest.raises(RuleError, match=f"Rule 'judged': {key} is"):
        Judged(**{key: value})


class WithResponse(Exception):
    def __init__(self, code: int, headers: dict[str, str]):
        self.response = type("Response", (), {"status_code": code, "headers": headers})()


def test_a_request_that_is_wrong_is_not_repeated():
    again = [code for code in (400, 401, 404, 408, 429, 503) if async_rule.may_pass(WithResponse(code, {}))]
    assert again == [408, 429, 503]


def test_a_server_says_when_to_come_back():
    assert async_rule.pause_after(WithResponse(429, {"retry-after": "7"}), 0) == 7.0
    assert async_rule.pause_after(WithResponse(429, {"retry-after": "9999"}), 0) == 30.0
    for odd in ("soon", "nan", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"):
        assert 0 < async_rule.pause_after(WithResponse(429, {"retry-after": odd}), 3) <= 0.008
    assert 0 < async_rule.pause_after(ConnectionError(), 3) <= 0.008


class Limited(Exception):
    status_code = 429
    response = type("Response", (), {"headers": {"retry-after": "0.2"}})()


def test_a_limit_that_one_call_meets_pauses_all_calls_to_its_server(gauge):
    asked: list[float] = []

    @dataclass(frozen=True, kw_only=True)
    class Paced(AsyncRule):
        async def score(self, row: Row) -> Verdict:
            asked.append(time.monotonic())
            await asyncio.sleep(0.01)
            if len(asked) <= 4 and row.text == TEXTS[0]:
                raise Limited
            return Verdict(1.0)

    assert RuleSet([Paced(concurrency=4, retries=0)])(completions=TEXTS) == [1.0] * 64
    assert len(asked) == 65
    assert asked[3] - asked[0] < 0.1 and asked[4] - asked[3] > 0.15, "60 calls waited, and not only the one"


def test_a_limit_that_never_ends_is_a_failing_call(gauge):
    @dataclass(frozen=True, kw_only=True)
    class Shut(AsyncRule):
        async def score(self, row: Row) -> Verdict:
            GAUGE.calls[row.text] += 1
            raise WithResponse(429, {})

    part = RuleSet([Shut(retries=1)]).explain("", "a").parts[0]
    assert (part.value, part.status) == (None, "infra_error")
    assert gauge.calls["a"] == 2 + async_rule._FREE_LIMITED


@pytest.mark.parametrize("retries", [0, 5])
def test_a_call_that_meets_a_limit_for_ever_ends_after_one_total_time(retries, gauge, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Shut(AsyncRule):
        async def score(self, row: Row) -> Verdict:
            GAUGE.calls[row.text] += 1
            raise WithResponse(429, {"retry-after": "99999999"})

    monkeypatch.setattr(async_rule, "_LONGEST_PAUSE_S", 0.03)
    monkeypatch.setattr(async_rule, "_LONGEST_LIMIT_S", 0.06)
    rules = RuleSet([Shut(retries=retries, concurrency=2)], limits=Limits(max_infra_frac=1.0))
    start = time.monotonic()
    parts = [one.parts[0] for one in rules.explain_all([""] * 4, TEXTS[:4])]
    assert {(part.value, part.status) for part in parts} == {(None, "infra_error")}
    assert time.monotonic() - start < 2.0
    assert all(0 < gauge.calls[text] <= 4 for text in TEXTS[:4]), "9 and more without a bound"


# Whole batches


@dataclass(frozen=True, kw_only=True)
class Batched(Rule):
    """The number of words, for all rows at once."""

    def cache_key(self, row: Row):
        return row.text

    def score_batch(self, rows):
        GAUGE.calls[tuple(row.text for row in rows)] += 1
        if any("raise" in row.text for row in rows):
            raise KeyError("gold")
        return [Verdict(float(len(row.text.split()))) for row in rows if row.text != "lost"]


def test_a_rule_may_judge_all_different_rows_at_once(gauge):
    rules = RuleSet([Batched(when={"task": "words"})])
    assert rules(completions=["a", "b c", "a", "d"], task=["words"] * 3 + ["other"]) == [1.0, 2.0, 1.0, None]
    assert gauge.calls == {("a", "b c"): 1}
    assert rules(completions=["a"], task=["words"]) == [1.0], "kept"
    assert gauge.calls.total() == 1


def test_a_rule_of_batches_judges_one_row_too():
    assert Batched().score(Row(None, "a b", None, {})) == Verdict(2.0)


@pytest.mark.parametrize(("text", "match"), [("raise", "KeyError: 'gold'"), ("lost", "1 verdicts for 2 rows")])
def test_a_batch_that_goes_wrong_names_the_rule(text, match):
    with pytest.raises(RuleError, match=f"Rule 'batched' raised .*{match}.*2 rows in score_batch"):
        RuleSet([Batched()])(completions=["a", text])
    assert RuleSet([Batched()], on_error="floor")(completions=["a", text]) == [0.0, 0.0]

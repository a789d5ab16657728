"""What a rule's value counts: scale, clip, rows; running normalisation; the warning about style."""

import json
import logging
import pickle
import statistics
from dataclasses import dataclass
from functools import reduce

import pytest

from tests.rules import rule_class
from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Keywords, Length, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.totals.composition import outbid_warning, span
from trl_ext.rewards.totals.moments import Moments

Given = rule_class("Given", lambda row: row.columns["given"], ("given",))
Scored = rule_class("Scored", lambda row: 0.0, floor=-1.0)


def totals(rule, *values, **columns):
    return RuleSet([rule])(completions=["x"] * len(values), given=list(values), **columns)


# Value ----------------------------------------------------------------------------------------------------------


def test_a_scale_maps_its_ends_to_zero_and_one_and_then_comes_the_clip():
    assert totals(Given(scale=(-2, 6)), -2.0, 2.0, 6.0, 10.0) == [0.0, 0.5, 1.0, 1.5]
    assert totals(Given(scale=(0, 2), clip=(0, 1)), -1.0, 1.0, 5.0) == [0.0, 0.5, 1.0]


def test_a_gate_opens_at_the_scaled_value():
    rules = RuleSet([Given(scale=(0, 4)), Keywords(required=("so",), gate="given")])
    assert rules(completions=["so", "so"], given=[4.0, 3.9]) == [2.0, 3.9 / 4]


def test_a_rule_counts_only_for_the_rows_that_it_is_for():
    rules = RuleSet([Given(when={"task": "math"}), Given(name="other", when={"task": ["code", "chat"]}, weight=2)])
    tasks = ["math", "code", "chat", "none"]
    assert rules(completions=["x"] * 4, given=[1.0] * 4, task=tasks) == [1.0, 2.0, 2.0, None]


def test_a_row_that_a_rule_is_not_for_is_not_scored_nor_what_it_gates():
    assert totals(Given(when={"task": "math"}), None, 1.0, task=["code", "math"]) == [None, 1.0]
    rules = RuleSet([Given(when={"task": "math"}), Keywords(required=("so",), gate="given")])
    assert rules(completions=["so", "so"], given=[1.0, 1.0], task=["math", "chat"]) == [2.0, None]
    with pytest.raises(Exception, match="column 'task'"):
        totals(Given(when={"task": "math"}), 1.0)


def test_a_measure_of_weight_0_gives_no_total_to_a_row_that_nothing_else_scores():
    measure = Length(high=8, unit="chars", weight=0)
    rules = RuleSet([Given(), measure])
    assert rules(completions=["x"] * 3, given=[1.0, None, 0.5]) == [1.0, None, 0.5]
    assert RuleSet([measure])(completions=["x"]) == [0.0]  # a set of measures alone scores what it measures


def test_settings_that_cannot_work_are_refused(subtests):
    for sentence, settings in {
        "Give the lower bound first": [dict(scale=(1, 1))],
        "Give two finite numbers": [dict(scale="0-1"), dict(clip=(0, float("nan")))],
        "Give columns with their values": [dict(when=["math"]), dict(when={})],
    }.items():
        for changes in settings:
            with subtests.test(changes=changes), pytest.raises(RuleError, match=sentence):
                Given(**changes)


def test_all_settings_go_through_yaml_and_pickles():
    answer = Answer(when={"task": ["math"]}, scale=(0, 2), clip=(0, 1))
    length = Length(high=8, weight=0.1, gate="answer")
    rules = RuleSet([answer, length], on_error="floor", isolate=False, normalise=True)
    again = RuleSet.from_dict(rules.to_dict())
    assert again == rules == pickle.loads(pickle.dumps(rules))
    assert again.to_dict() == rules.to_dict()


# Running normalisation --------------------------------------------------------------------------------------------


def test_moments_of_parts_are_those_of_the_whole():
    values = [3.0, -1.0, 4.0, 1.5, 9.0, 2.6]
    parts = reduce(
        Moments.merged, [Moments.of(values[:2]), Moments(), Moments.of(values[2:5]), Moments.of(values[5:])]
    )
    assert parts.mean == pytest.approx(statistics.mean(values))
    assert parts.std == pytest.approx(statistics.stdev(values))


def test_normalised_totals_are_measured_against_all_totals_before():
    rules = RuleSet([Given()], normalise=True)
    assert rules(completions=["x"] * 3, given=[1.0, 2.0, 6.0]) == [1.0, 2.0, 6.0]
    expected = (5.0 - 3.0) / statistics.stdev([1.0, 2.0, 6.0])
    resumed = set_of(rules.state_dict())
    for one in (rules, resumed):
        assert one(completions=["x", "x"], given=[5.0, None]) == [pytest.approx(expected), None]


def test_the_first_right_answer_after_a_batch_of_wrong_ones_is_not_enlarged():
    rules = set_of()
    assert rules(completions=["x"] * 64, given=[0.3] * 64) == [0.3] * 64
    assert rules(completions=["x"] * 2, given=[1.3, 0.3]) == pytest.approx([1.0, 0.0])


BATCHES = (([1.0, 2.0], [6.0, 7.0]), ([5.0, None], [0.5, 3.0]), ([2.0, 2.0], [None, None]), ([9.0, 4.0], [1.0, 8.0]))


def set_of(state=None) -> RuleSet:
    rules = RuleSet([Given()], normalise=True)
    if state is not None:
        rules.load_state_dict(state)
    return rules


def synchronised(ranks: list[RuleSet], batch) -> None:
    """What a trainer does after each batch: each rank sends the moments of its own totals."""
    seen = [Moments.of(given for given in rank if given is not None) for rank in batch]
    sent = [[part.count, part.mean, part.squares] for part in seen]
    for rules, expected in zip(ranks, sent, strict=True):

        def gather(own, expected=expected):
            assert own == pytest.approx(expected)
            return sent

        rules.synchronise(gather)


@pytest.mark.parametrize("resumed_after", [None, 0, 1, 2, 3])
def test_two_synchronised_ranks_hold_the_statistics_of_one_process(resumed_after):
    alone, ranks = set_of(), [set_of(), set_of()]
    for number, batch in enumerate(BATCHES):
        whole = alone(completions=["x"] * 4, given=[*batch[0], *batch[1]])
        parts = [rules(completions=["x"] * 2, given=given) for rules, given in zip(ranks, batch, strict=True)]
        assert [*parts[0], *parts[1]] == [
            total if total is None else pytest.approx(total, abs=1e-9) for total in whole
        ]
        synchronised(ranks, batch)
        if number == resumed_after:
            ranks = [set_of(rules.state_dict()) for rules in ranks]
            alone = set_of(alone.state_dict())
        expected = alone.state_dict()["moments"]
        for rules in ranks:
            assert rules.state_dict()["moments"] == pytest.approx(expected, abs=1e-9)


def test_an_evaluation_leaves_the_statistics_of_the_training():
    rules = set_of()
    rules(completions=["x"] * 2, given=[1.0, 2.0])
    rules.synchronise(lambda own: [own])
    before = rules.state_dict()
    rules(completions=["x"] * 2, given=[100.0, 200.0])
    rules.synchronise(None)
    assert rules.state_dict() == before


# Errors, cache, early start ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Raises(Rule):
    tier = "inline"

    error: type = ValueError

    def score(self, row: Row) -> Verdict:
        raise self.error("no")


@pytest.mark.parametrize("error", [ValueError, SystemExit, RecursionError])
def test_an_error_stops_a_set_or_where_told_to_go_on_is_the_floor_and_said_once(error, caplog):
    raises = Raises(error=error, name=f"raises_{error.__name__}")
    with pytest.raises(RuleError, match=f"Rule '{raises.name}' raised {error.__name__}: no"):
        RuleSet([raises])(completions=["x"])
    rules = RuleSet([raises, Keywords(required=("so",))], on_error="floor")
    metrics: dict[str, float] = {}
    for _ in range(3):
        assert rules(completions=["so", "x"], log_metric=metrics.__setitem__) == [1.0, 0.0]
    assert metrics[f"rules/{raises.name}/error_frac"] == 1.0
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "no (row 0" in warning.getMessage()


def test_the_trace_tells_what_every_rule_gave_and_read():
    columns = {}
    rules = RuleSet([Answer(), Length(high=2, weight=0.5, gate="answer")])
    rules(completions=["A: 17"], completion_ids=[[1]], answer=["18" + " " * 900], log_extra=columns.__setitem__)
    (trace,) = map(json.loads, columns["rule_trace"])
    assert trace["answer"] == [0.0, "ok", 0.0, "'A:': 17; gold whole text: 18"]
    assert trace["length"] == [1.0, "ok", 0.0, "gate 'answer' is shut; 1 tokens"]
    assert columns["rule_columns"] == ['{"answer": "18"}']
    RuleSet([Answer()])(completions=["A: 17"], answer=["9" * 10_000], log_extra=columns.__setitem__)
    (cells,) = map(json.loads, columns["rule_columns"])
    assert len(cells["answer"]) == 200 and cells["answer"].endswith("9...")
    columns.clear()
    RuleSet([Keywords(required=("so",))])(completions=["so"], log_extra=columns.__setitem__)
    assert columns.keys() == {"rule_trace"}, "a rule without columns"


# Bidding ----------------------------------------------------------------------------------------------------------


def test_style_that_can_outbid_a_right_answer_is_warned_of(subtests):
    half, words = Length(weight=0.5), dict(required=("a",), weight=0.5)
    for rules, is_warned in (
        ([Answer(), half, Keywords(required=("a",), weight=0.4)], False),
        ([Answer(), half, Keywords(**words)], True),
        ([Answer(), half, Keywords(**words, gate="answer")], False),
        ([Answer(), Scored(weight=0.5)], True),  # from -1 to 1
        ([Answer(), Scored(weight=0.5, clip=(0, 1))], False),
        ([Answer(weight=0.2), Answer(name="other"), Length(weight=0.3)], True),
        ([Length(), Keywords(required=("a",))], False),
        ([Answer()], False),
    ):
        with subtests.test(rules=rules):
            assert bool(outbid_warning(rules)) == is_warned


def test_the_warning_names_the_rules_and_what_they_add(caplog):
    RuleSet([Answer(), Length(weight=1.5, name="long_enough")])
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "'long_enough' can add 1.5 without a right answer, which itself is worth 1" in warning
    assert "gate: answer" in warning
    assert (span(Scored(weight=-0.5)), span(Scored(weight=2, scale=(-1, 1)))) == (1.0, 2.0)

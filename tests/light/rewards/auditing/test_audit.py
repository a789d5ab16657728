"""audit: golds against themselves and against each other."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from trl_ext.errors import ConfigError, DataError, RuleError
from trl_ext.rewards import Answer, Length, Math, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.auditing.audit import audit, gold_key, other_rows

GOLDS = [{"answer": answer} for answer in ("18", "... #### 42", "\\boxed{3/4}", "1,018", "18.0")]


@dataclass(frozen=True, slots=True)
class FirstDigit(Rule):
    """Reads the first digit of gold and completion, and so fragments of both."""

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True
    bare_gold: bool = True

    @property
    def columns(self):
        return ("answer",)

    def ideal(self, columns):
        return columns["answer"]

    def score(self, row: Row) -> Verdict:
        gold = row.columns["answer"]
        digit = gold if self.bare_gold else first_digit(gold)
        return Verdict(float(first_digit(row.text) == digit))


def first_digit(text: str) -> str:
    return next((char for char in text if char.isdigit()), "")


def one(report):
    (found,) = report.rules
    return found


@pytest.mark.parametrize("kind", ["number", "exact"])
def test_golds_that_are_read_as_themselves_are_ok(kind):
    report = audit(RuleSet([Answer(kind=kind)]), GOLDS)
    assert report.ok and one(report).num_right == one(report).num_rows == report.num_rows == 5


def test_a_letter_is_audited_as_it_stands():
    report = audit(RuleSet([Answer(kind="choice")]), [{"answer": "B) Paris"}, {"answer": "The letter (C)"}])
    assert report.ok and one(report).num_compared == 2


def test_every_gold_meets_as_many_others_as_there_are():
    assert one(audit(RuleSet([Answer()]), GOLDS, others=2)).num_compared == 10
    assert one(audit(RuleSet([Answer()]), GOLDS, others=9)).num_compared == 15  # 18 and 18.0 are one gold
    assert one(audit(RuleSet([Answer()]), GOLDS, others=0)).num_compared == 0


def test_a_gold_that_cannot_be_read_is_counted_and_named():
    report = audit(RuleSet([Answer()]), [*GOLDS, {"answer": "3\\sqrt{13}"}, {"answer": None}])
    found = one(report)
    assert not report.ok and found.num_unreadable == 2 and "2 (28.6%)" in str(report)
    assert [(failure.kind, failure.row) for failure in found.failures] == [("unreadable", 5), ("unreadable", 6)]
    assert "answer, row 5: its gold cannot be read" in str(report)


def test_a_gold_that_is_read_as_a_fragment_is_wrong_and_accepts_the_fragment():
    report = audit(RuleSet([FirstDigit()]), [{"answer": "3"}, {"answer": "31"}])
    kinds = {(failure.kind, failure.row, failure.other) for failure in one(report).failures}
    assert kinds == {("wrong", 1, None), ("accepted", 0, 1)} and not report.ok
    assert "row 0: the gold of row 1 earns 1 too" in str(report)


def test_a_gold_that_leaves_the_answers_of_other_rows_undecided_is_shown():
    report = audit(RuleSet([Math()], isolate=False), [{"answer": gold} for gold in ("18", "a_0 + \\ldots + a_n")])
    found = one(report)
    assert not report.ok and (found.num_right, found.num_own_text, found.lost_rows) == (2, 1, (1,))
    assert "math, row 1: only its own text is right: \\boxed{18} earns no value" in str(report)


def test_golds_that_are_one_to_the_rule_are_alike():
    report = audit(RuleSet([FirstDigit(bare_gold=False)]), [{"answer": "3x"}, {"answer": "3y"}, {"answer": "4"}])
    found = one(report)
    assert (found.num_right, found.num_accepted, found.num_alike) == (3, 0, 2) and not report.ok


def test_a_rare_pair_of_golds_that_are_alike_is_no_fault():
    rows = [{"answer": str(number)} for number in range(200, 220)]
    report = audit(RuleSet([Answer()]), [{"answer": "1/2"}, {"answer": "0.5"}, *rows], others=21)
    assert one(report).num_alike == 2 and report.ok


def test_the_same_seed_draws_the_same_others_which_have_another_gold():
    keys = [str(number) for number in range(50)]
    assert other_rows(keys, 3, 7) == other_rows(keys, 3, 7) != other_rows(keys, 3, 8)
    keys = ["a", "a", None, "b", "c"]
    for key, others in zip(keys, other_rows(keys, 2, 0), strict=True):
        assert len(others) == (0 if key is None else 2)
        assert all(keys[other] not in (key, None) for other in others)


def test_golds_are_equal_as_texts_and_plain_numbers(subtests):
    for one, two in (("18", "18.0"), ("1,018.50", "1018.5"), (" New  York", "new york")):
        with subtests.test(one):
            assert gold_key(one) == gold_key(two)
    for one, two in (("1,2", "12"), ("100", "1"), ("0.5", "5")):
        with subtests.test(one):
            assert gold_key(one) != gold_key(two)


def test_a_rule_is_audited_on_the_rows_that_it_is_for():
    rules = RuleSet([Answer(when={"task": "sums"}), Answer(name="letter", kind="choice", when={"task": "letters"})])
    rows = [{"answer": "18", "task": "sums"}, {"answer": "B", "task": "letters"}, {"answer": "C", "task": "letters"}]
    report = audit(rules, rows)
    assert report.ok and [found.num_rows for found in report.rules] == [1, 2]


def test_a_rule_that_is_for_no_row_is_a_fault():
    report = audit(RuleSet([Answer(), Answer(name="level", when={"level": 5})]), [{"answer": "18", "level": "5"}])
    assert not report.ok and "level: its `when` fits no row." in str(report)


def test_weights_gates_and_style_do_not_enter():
    rules = RuleSet([Answer(weight=0.1), Length(low=900, high=999, unit="words")])
    assert audit(rules, GOLDS).ok


def test_a_rule_that_cannot_say_what_is_right_is_not_asked():
    class Silent(FirstDigit):
        def ideal(self, columns):
            return None

    report = audit(RuleSet([Answer(), Silent()]), GOLDS)
    assert report.ok and [found.num_not_asked for found in report.rules] == [0, 5]
    with pytest.raises(ConfigError, match="Nothing could be audited: 'silent' on 5 rows"):
        audit(RuleSet([Silent()]), GOLDS)


def test_style_alone_and_data_without_the_column_cannot_be_audited():
    with pytest.raises(ConfigError, match="None of the rules 'length' judges correctness"):
        audit(RuleSet([Length()]), GOLDS)
    with pytest.raises(DataError, match="Rule 'answer' reads the column 'answer', which the dataset lacks"):
        audit(RuleSet([Answer()]), [{"solution": "18"}])


def test_data_without_rows_is_refused(subtests):
    for data in ([], "18", {"answer": ["18"]}, ["18"], None):
        with subtests.test(data=data), pytest.raises(DataError, match=r"The data (has no rows|is a )"):
            audit(RuleSet([Answer()]), data)


def test_an_argument_that_cannot_work_is_refused(subtests):
    for others in (-1, 1.5, "3", True):
        with subtests.test(others=others), pytest.raises(ConfigError, match="others is "):
            audit(RuleSet([Answer()]), GOLDS, others)


def test_a_rule_that_raises_is_named_with_its_rows():
    class Broken(FirstDigit):
        def score(self, row):
            raise KeyError("x")

    class BrokenIdeal(FirstDigit):
        def ideal(self, columns):
            return columns["answer"] + None

    for rule, match in (
        (Broken(), "While auditing rows 0 to 4 of the data: Rule 'broken' raised KeyError"),
        (BrokenIdeal(), r"ideal\(\) raised TypeError: .* \(row 0\)"),
    ):
        with pytest.raises(RuleError, match=match):
            audit(RuleSet([rule]), GOLDS)


def test_a_report_goes_through_json():
    report = audit(RuleSet([Answer()]), [*GOLDS, {"answer": "none"}])
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False and plain["rules"][0]["failures"][0]["row"] == 5


def test_a_dataset_is_audited_like_a_list():
    datasets = pytest.importorskip("datasets")
    report = audit(RuleSet([Answer()]), datasets.Dataset.from_list(GOLDS))
    assert report.ok and one(report).num_rows == 5


IDEAL_GOLDS = {
    "number": (
        *("18", 18, "9 * 2 = 18\n#### 18", "\\boxed{\\frac{1}{2}}", "$1,234.50$"),
        "The answer is 18 because 9 * 2 = 18.",
    ),
    "exact": ("New York", "a\nb", "The answer is New York."),
    "choice": ("(B)", "A: B", "\\boxed{B}"),
}


def test_the_ideal_answer_earns_the_ceiling(subtests):
    for kind, golds in IDEAL_GOLDS.items():
        for gold in golds:
            for rule in (Answer(kind=kind), Answer(kind=kind, where="all")):
                with subtests.test(gold, rule=rule):
                    row = Row(None, rule.ideal({"answer": gold}), None, {"answer": gold})
                    assert rule.score(row).value == rule.ceiling
    assert [Answer().ideal({"answer": gold}) for gold in (None, "", "  ", True, [])] == [None] * 5


def test_each_gold_is_tried_in_the_forms_of_models_and_the_first_that_is_not_paid_is_named():
    report = audit(RuleSet([Math()], isolate=False), [{"answer": gold} for gold in ("18", "0 \\text{ or } 1", "?")])
    assert one(report).forms == {"box": (2, 1), "tag": (2, 1), "tag with dollars": (2, 1)} | dict.fromkeys(
        ("The answer is", "Answer:"), (3, 0)
    )
    assert "each gold's own text as  box            tag" in str(report) and "math " in str(report)
    assert "math, row 2: its gold earns 0 as <answer>?</answer> (no_answer: '<answer>' is empty)" in str(report)


def test_forms_are_tried_only_where_they_make_sense():
    rows = [{"answer": "New York"}, {"answer": "Paris"}]
    found = audit(RuleSet([Answer(kind="exact"), FirstDigit()]), rows).rules
    assert "tag with dollars" not in found[0].forms and set(found[0].forms.values()) == {(2, 0)}
    assert found[1].forms == {}


def test_a_boolean_gold_is_the_text_true_or_false():
    report = audit(RuleSet([Answer(kind="exact")]), [{"answer": True}, {"answer": False}])
    assert report.ok and one(report).num_compared == 2
    told = str(audit(RuleSet([Answer()]), [{"answer": True}]))
    assert "True is neither text nor a number: kind: exact reads it" in told

"""RuleSet: weights, gates, clip, faults, explanation, pickling, and the calls of TRL with its metrics."""

import pickle
from collections import UserList
from dataclasses import dataclass

import pytest

from tests.rules import rule_class
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer, Keywords, Length, Row, Rule, RuleSet, Tags, Verdict, completion_text

Fixed = rule_class("Fixed", lambda row: row.columns["given"], ("given",))
Penalty = rule_class("Penalty", lambda row: row.columns["given"], ("given",), floor=-1.0)
Fails = rule_class("Fails", lambda row: 1 / len(row.text))
Broken = rule_class("Broken", lambda row: float("nan"))


class Bare(Rule):
    tier = "inline"

    def score(self, row: Row) -> Verdict:
        return "1.0"


class Unnamed(Rule):
    """A rule that tests its fields where the name is given."""

    def __post_init__(self) -> None:
        pass


@pytest.fixture
def answer_and_length() -> RuleSet:
    return RuleSet([Answer(), Length(high=2, weight=0.1, gate="answer")])


def test_the_total_is_the_weighted_sum():
    rules = RuleSet([Answer(), Keywords(required=("eggs", "dollars"), weight=-0.5)])
    assert rules(completions=["A: 18 eggs", "A: 17 eggs"], answer=["18", "18"]) == [0.75, -0.25]


def test_a_column_may_be_any_sequence_such_as_a_column_of_datasets():
    assert RuleSet([Answer()])(completions=["A: 18", "A: 17"], answer=UserList([18, 18])) == [1.0, 0.0]


def test_a_gate_opens_only_at_the_full_value_and_not_behind_a_shut_one(answer_and_length):
    rewards = answer_and_length(completions=["A: 18", "A: 17"], completion_ids=[[1], [1]], answer=[18, 18])
    assert rewards == [1.1, 0.0]
    so = Keywords(required=("so",), weight=0.0, gate="answer")
    rules = RuleSet([Answer(weight=0.0), so, Keywords(forbidden=("idk",), name="sure", gate="keywords")])
    assert rules(completions=["so A: 18", "so A: 17"], answer=[18, 18]) == [1.0, 0.0]


def test_the_total_is_clipped():
    rules = RuleSet([Fixed(weight=3.0)], clip=(-1, 1))
    assert rules(completions=["", "", ""], given=[1.0, -1.0, 0.2]) == [1.0, -1.0, pytest.approx(0.6)]


def test_a_rule_without_a_value_is_left_out_and_so_is_what_it_gates(answer_and_length):
    rules = RuleSet([Answer(), Keywords(forbidden=("idk",), weight=0.5)])
    assert rules(completions=["A: 18"], answer=["unreadable"]) == [0.5]
    assert RuleSet([Answer()])(completions=["A: 18", "A: 18"], answer=["unreadable", "18"]) == [None, 1.0]
    assert answer_and_length(completions=["A: 18"], completion_ids=[[1]], answer=["unreadable"]) == [None]


def test_nothing_that_is_not_finite_leaves_the_set_and_it_shows():
    for value in (float("nan"), float("inf"), -float("inf"), 1e300):
        assert RuleSet([Fixed(weight=2.0)])(completions=[""], given=[value]) == [0.0]
    assert RuleSet([Penalty()])(completions=[""], given=[float("nan")]) == [-1.0], "the rule's own floor"
    part = RuleSet([Fixed()]).explain(None, "", given=float("nan")).parts[0]
    assert (part.value, part.status, part.detail) == (0.0, "not_finite", "the rule gave nan, weight 1.0")


def test_integers_and_booleans_become_floats():
    rewards = RuleSet([Fixed()])(completions=["", ""], given=[True, 1])
    assert [type(reward) for reward in rewards] == [float, float]


def test_a_rule_that_raises_is_named_with_row_and_completion_also_after_pickling():
    with pytest.raises(RuleError) as caught:
        RuleSet([Fails()])(completions=["fine", ""], answer=[18, 18])
    message = str(caught.value)
    assert "Rule 'fails' raised ZeroDivisionError: division by zero (row 1, test_ruleset.py line" in message
    assert "Completion: ''. Columns: answer." in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (RuleError, message)


def test_a_rule_that_returns_no_verdict_is_told_so_and_a_long_completion_is_cut():
    with pytest.raises(RuleError, match=r"Rule 'bare' raised TypeError: score\(\) returned '1.0', not a Verdict"):
        RuleSet([Bare()])(completions=[""])
    with pytest.raises(RuleError) as caught:
        RuleSet([Length()])(completions=["x" * 1000])
    assert "x" * 200 in str(caught.value) and "x" * 201 not in str(caught.value)


def test_a_set_pickles_with_its_name(answer_and_length):
    answer_and_length.__name__ = "maths"
    again = pickle.loads(pickle.dumps(answer_and_length))
    assert again == answer_and_length
    assert again.__name__ == "maths"
    assert again(completions=["A: 18"], completion_ids=[[1]], answer=["18"]) == [1.1]
    assert [column.__name__ for column in pickle.loads(pickle.dumps(again.split()))] == ["answer", "length"]


def test_columns_are_the_union_of_what_the_rules_read():
    rules = RuleSet([Answer(), Answer(gold="given", name="other"), Fixed()])
    assert rules.columns == ("answer", "given")


def test_explain_prints_a_table():
    rules = RuleSet([Answer(), Tags("think", weight=0.1), Length(high=2, weight=0.2, gate="tags")], clip=(-1, 1))
    lines = str(rules.explain("How many?", "The answer\nis unclear", [7, 8], answer="18")).splitlines()
    assert lines == [
        "rule    value  status     weight  gated  adds    detail",
        "answer  0.000  no_answer  1       no     +0.000  'answer is': no number in 'unclear'",
        "tags    0.000  ok         0.1     no     +0.000  not once, closed, filled and in order: think",
        "length  1.000  gated      0.2     yes    +0.000  gate 'tags' is shut; 2 tokens",
        "total   0.000  clip -1..1",
    ]


def test_a_single_row_is_scored_and_explained(answer_and_length):
    assert answer_and_length.score("How many?", "A: 18", [7], answer="18") == 1.1
    explanation = answer_and_length.explain(None, "A: 18", [7], answer="unreadable")
    assert (explanation.total, explanation.parts[0].status) == (None, "gold_invalid")
    assert str(explanation).splitlines()[-1] == "total   none"


def test_split_columns_sum_to_the_total(answer_and_length):
    batch = {"completions": ["A: 18", "A: 17"], "completion_ids": [[1], [1]], "answer": [18, 18]}
    columns = [column(**batch) for column in answer_and_length.split()]
    assert [sum(row) for row in zip(*columns, strict=True)] == answer_and_length(**batch)


@dataclass(frozen=True, kw_only=True)
class Counting(Answer):
    """Answer, which notes each row that it is asked for."""

    asked: list[str]

    def score(self, row: Row) -> Verdict:
        self.asked.append(row.text)
        return Answer(self.gold).score(row)


def test_a_rule_is_asked_once_for_all_columns_of_a_batch():
    gate = Counting(asked=[], name="right")
    rules = RuleSet([gate, *(Length(high=2, weight=0.1, gate="right", name=f"length_{n}") for n in range(4))])
    columns = rules.split()
    for texts in (["A: 18", "A: 17"], ["A: 18", "A: 16"]):
        batch = {"completions": texts, "completion_ids": [[1], [1]], "answer": ["18", "18"]}
        gate.asked.clear()
        found = [column(**batch, trainer_state=None) for column in columns]
        assert gate.asked == texts
        assert found == [[1.0, 0.0]] + [[0.1, 0.0]] * 4


def test_columns_share_nothing_that_has_changed_and_a_clipped_set_does_not_split(answer_and_length):
    column = RuleSet([Answer()]).split()[0]
    batch = {"completions": ["A: 18"], "answer": ["18"]}
    assert column(**batch) == [1.0]
    batch["answer"][0] = "17"
    assert column(**batch) == [0.0], "changed in place"
    answer, length = answer_and_length.split()
    assert answer.columns == length.columns == ("answer",), "a gate's column, too"
    assert answer(completions=["A: 18"], completion_ids=[[1]], answer=["18"]) == [1.0]
    assert length(completions=["A: 18"], completion_ids=[[1]], answer=["17"]) == [0.0]
    with pytest.raises(RuleError, match="without clip"):
        RuleSet([Answer()], clip=(0, 1)).split()


def test_a_set_that_normalises_its_sum_does_not_split():
    with pytest.raises(RuleError, match=r"normalise=True is of the sum, and split\(\) has no sum"):
        RuleSet([Answer()], normalise=True).split()


def test_rules_that_cannot_work_together_fail_at_construction(subtests):
    for rules, words in (
        *(([], "at least one rule"), (Answer(), r"Write RuleSet\(\[...\]\)"), ([len], "is not a rule")),
        *(([Answer(), Answer()], "Several rules are named answer"), ([Answer(gate="tags")], "has the gate 'tags'")),
        ([Answer(gate="answer")], "in a circle"),
        ([Answer(gate="tags"), Tags("think", gate="answer")], "in a circle"),
        ([Answer(name="rules")], "share a metric"),
        ([Unnamed()], r"has no name\. Override check\(\), not __post_init__"),
    ):
        with subtests.test(rules=rules), pytest.raises(RuleError, match=words):
            RuleSet(rules)


def test_a_clip_is_two_finite_numbers_in_order():
    for clip in ((1, -1), (1, 1), (0,), 3, (0, float("inf")), ("a", "b")):
        with pytest.raises(RuleError, match="clip is"):
            RuleSet([Answer()], clip=clip)


def test_a_column_that_is_missing_or_of_another_length_is_named():
    with pytest.raises(DataError, match=r"Rule 'answer' reads the column 'answer'.* its columns are: gold, level"):
        RuleSet([Answer()])(completions=["A: 18"], level=[1], gold=[18])
    for column in ("prompts", "completion_ids", "answer"):
        batch = {"completions": ["A: 18", "A: 17"], "answer": [18, 18]} | {column: [1]}
        with pytest.raises(DataError, match=f"Column '{column}' has 1 rows for 2 completions"):
            RuleSet([Answer()])(**batch)


# As TRL calls it -----------------------------------------------------------------------------------------------------


@pytest.fixture
def rules() -> RuleSet:
    return RuleSet([Answer(), Length(high=2, weight=0.5, gate="answer")])


def called_as_trl_does(rules, metrics: dict[str, float] | None = None, **changes):
    batch = {
        "prompts": ["How many?", "How many?"],
        "completions": ["A: 18", "A: 17"],
        "completion_ids": [[1, 2], [1, 2]],
        "answer": ["18", "18"],
        "trainer_state": object(),
        "log_extra": lambda column, values: None,
        "log_metric": (metrics if metrics is not None else {}).__setitem__,
        "environments": [object()],
    }
    return rules(**(batch | changes))


def test_what_is_no_column_is_ignored_and_messages_are_rewarded_as_strings_are(rules):
    assert called_as_trl_does(rules) == called_as_trl_does(rules, accelerator=object()) == [1.5, 0.0]
    assert rules(completions=["A: 18"], prompts=["?"], completion_ids=[[1]], answer=["18"]) == [1.5], "no extras"
    messages = [[{"role": "assistant", "content": text}] for text in ("A: 18", "A: 17")]
    prompts = [[{"role": "user", "content": "How many?"}]] * 2
    assert called_as_trl_does(rules, completions=messages, prompts=prompts) == [1.5, 0.0]


def test_the_text_of_a_completion_is_its_last_assistant_message(subtests):
    def said(content):
        return {"role": "assistant", "content": content}

    tool, new = {"role": "tool", "content": "18"}, {"type": "text", "text": "18"}
    for text, completions in {
        "": (None, [], [tool], [said(None)]),
        "old": ([said("old"), tool],),
        "new": ([said("old"), said("new")],),
        "A: 18": ([said([{"type": "text", "text": "A: "}, new])],),
        "18": ([said([{"type": "image"}, new])],),
    }.items():
        for completion in completions:
            with subtests.test(completion=completion):
                assert completion_text(completion) == text
    for completion in (18, ["A: 18"], [said(18)]):
        with subtests.test(completion=completion), pytest.raises(DataError, match="Give"):
            completion_text(completion)


def test_an_empty_batch_gets_no_rewards_and_a_call_without_completions_is_refused(rules):
    metrics = {}
    assert called_as_trl_does(rules, metrics, prompts=[], completions=[], completion_ids=[], answer=[]) == []
    assert metrics == {}
    with pytest.raises(DataError, match="no completions"):
        rules(prompts=["How many?"], answer=["18"])


SHARES = ("none_frac", "undecided_frac", "timeout_frac", "error_frac", "not_finite_frac", "skipped_frac", "cache_frac")


def test_every_rule_logs_how_its_rows_went_with_mean_and_deviation_under_the_keys_of_trl(rules):
    metrics = {}
    called_as_trl_does(rules, metrics)
    assert {key: value for key, value in metrics.items() if key.startswith("rewards/")} == {
        "rewards/answer/mean": 0.5,
        "rewards/answer/std": 0.5,
        "rewards/length/mean": 1.0,
        "rewards/length/std": 0.0,
    }
    assert all(metrics[f"rules/{name}/{share}"] == 0.0 for name in ("answer", "length") for share in SHARES)
    assert metrics["rules/length/gated_frac"] == 0.5
    assert metrics["rules/answer/p95_ms"] > 0


def test_the_keys_are_the_same_whatever_the_rows_hold(rules):
    """A rank whose rows all went another way must log what the others log."""
    usual, unusual = {}, {}
    called_as_trl_does(rules, usual)
    called_as_trl_does(rules, unusual, answer=["unreadable", None])
    assert set(usual) - set(unusual) == {"rewards/answer/mean", "rewards/answer/std"}, "a mean of nothing is no number"


def test_rows_without_a_value_are_left_out_of_the_mean_and_odd_ones_are_counted(rules):
    metrics = {}
    called_as_trl_does(rules, metrics, answer=["18", "unreadable"])
    assert metrics["rewards/answer/mean"] == 1.0
    assert metrics["rules/answer/none_frac"] == 0.5
    assert called_as_trl_does(RuleSet([Broken()]), metrics) == [0.0, 0.0]
    assert metrics["rules/broken/not_finite_frac"] == 1.0


def test_split_columns_leave_the_mean_to_trl(rules):
    metrics = {}
    for column in rules.split():
        called_as_trl_does(column, metrics)
    assert not [key for key in metrics if key.startswith("rewards/")]
    assert metrics["rules/length/gated_frac"] == 0.5


def test_token_ids_from_a_tensor_are_plain_integers():
    class Tensor(list):
        def tolist(self):
            return [int(item) for item in self]

    assert RuleSet([Length(high=2)])(completions=[""], completion_ids=[Tensor([1.0, 2.0])]) == [1.0]

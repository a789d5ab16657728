"""RuleSet as TRL calls it: its arguments, its shapes of completions, its metrics."""

import pytest

from trl_ext.errors import DataError
from trl_ext.rewards import Answer, Length, Row, Rule, RuleSet, Verdict, completion_text


class Broken(Rule):
    tier = "inline"

    def score(self, row: Row) -> Verdict:
        return Verdict(float("nan"))


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

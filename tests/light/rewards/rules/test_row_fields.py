"""What a rule sees besides the text: turns, the group, the step, columns in arrays."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from trl_ext import RuleSet
from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Call, Row, Rule, Verdict
from trl_ext.rewards.base.rows import turns

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 9, "b": 2}}}
CONVERSATION = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "18"},
    {"role": "assistant", "content": "A: 18", "reasoning_content": "The tool says 18."},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Rule):
    """Keeps the rows that it is asked for."""

    tier = "inline"
    reads_group = True
    rows: list[Row]

    def score(self, row: Row) -> Verdict:
        self.rows.append(row)
        return Verdict(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestRight(Rule):
    """1.0 for the shortest right answer of the group, less for longer ones, 0.0 for wrong ones."""

    tier = "inline"
    reads_group = True

    @property
    def columns(self) -> tuple[str, ...]:
        return Answer().columns

    def score(self, row: Row) -> Verdict:
        right = [len(one.text) for one in (row, *row.group) if Answer().score(one).value == 1.0]
        is_right = Answer().score(row).value == 1.0
        return Verdict(min(right) / len(row.text) if is_right else 0.0)


def seen(**batch):
    rule = Seen(rows=[])
    RuleSet([rule])(**batch)
    return rule.rows


def test_a_row_made_of_four_arguments_is_whole():
    row = Row("9 * 2 =", "A: 18", None, {"answer": "18"})
    assert (row.messages, row.group, row.step) == ((), (), None)


def test_a_rule_sees_the_turns_of_a_conversation():
    (row,) = seen(prompts=["9 * 2 ="], completions=[CONVERSATION])
    assert row.messages == tuple(CONVERSATION)
    assert row.messages[0]["tool_calls"][0]["function"]["name"] == "multiply"
    assert row.text == "A: 18"


def test_a_plain_text_is_one_turn_and_thoughts_that_never_end_are_no_content():
    assert turns("A: 18") == ({"role": "assistant", "content": "A: 18"},)
    assert turns(None) == ()
    assert turns("<think>9 * 2")[0] == {"role": "assistant", "content": "", "reasoning_content": "9 * 2"}


def test_reasoning_stands_apart_from_the_content_wherever_a_template_puts_it(subtests):
    for message in (
        *({"content": "A: 18", "reasoning_content": "9 * 2"}, {"content": "A: 18", "thinking": "9 * 2"}),
        *({"content": "A: 18", "reasoning": "9 * 2"}, {"content": "<think>9 * 2</think>A: 18"}),
        {"content": "9 * 2\n</think>A: 18"},
    ):
        with subtests.test(message=message):
            (turn,) = turns([{"role": "assistant", **message}])
            assert turn == {"role": "assistant", "content": "A: 18", "reasoning_content": "9 * 2"}


def test_tags_of_other_roles_are_left_alone():
    message = {"role": "tool", "content": "<think>no</think>"}
    assert turns([message]) == (message,)


def test_the_group_is_the_other_neighbours_with_the_same_prompt_in_the_batch():
    rows = seen(prompts=["p", "p", "p", "q", "q", "r"], completions=list("abcdef"))
    assert [[one.text for one in row.group] for row in rows] == [["b", "c"], ["a", "c"], ["a", "b"], ["e"], ["d"], []]
    rows = [row for part in ("abc", "d") for row in seen(prompts=["p"] * len(part), completions=list(part))]
    assert [len(row.group) for row in rows] == [2, 2, 2, 0]


def test_members_of_a_group_are_whole_rows_without_a_group():
    rows = seen(prompts=["p", "p"], completions=["a", "b"], completion_ids=[[1], [2, 3]], answer=["18", "18"])
    (other,) = rows[0].group
    assert (other.text, other.completion_ids, other.columns, other.group) == ("b", (2, 3), {"answer": "18"}, ())


def test_prompts_are_compared_by_their_messages_and_arrays_or_none_make_no_group(subtests):
    for contents, sizes in ((["9 * 2 ="] * 2, [1, 1]), ([np.arange(3), np.arange(3)], [0, 0])):
        prompts = [[{"role": "user", "content": content}] for content in contents]
        with subtests.test(contents=contents):
            assert [len(row.group) for row in seen(prompts=prompts, completions=["a", "b"])] == sizes
    assert [row.group for row in seen(completions=["a", "b"])] == [(), ()]


def test_a_rule_can_measure_against_the_shortest_right_answer():
    rules = RuleSet([ShortestRight()])
    texts = ["A: 18", "9 + 9 = A: 18", "A: 1", "A: 18 "]
    rewards = rules(prompts=["9 * 2 ="] * 4, completions=texts, answer=["18"] * 4)
    assert rewards == pytest.approx([1.0, 5 / 13, 0.0, 5 / 6])
    found = rules.explain_all(["p"] * 2, ["A: 18", "so A: 18"], answer=["18"] * 2)
    assert [one.total for one in found] == pytest.approx([1.0, 5 / 8])


def group_size(row: Row) -> float:
    return 1.0 + len(row.group)


def test_a_group_that_is_not_asked_for_does_not_seem_empty():
    batch = dict(prompts=["p", "p"], completions=["a", "b"])
    assert RuleSet([Call(group_size, group=True, isolate=False)])(**batch) == [2.0, 2.0]
    with pytest.raises(RuleError, match="reads_group = True"):
        RuleSet([Call(group_size, isolate=False)])(**batch)


def test_a_rule_sees_the_step_of_the_training():
    state = SimpleNamespace(global_step=7, max_steps=10)
    assert [row.step for row in seen(completions=["a"], trainer_state=state)] == [7]
    assert [row.step for row in seen(completions=["a"])] == [None]


def test_a_column_may_be_an_array():
    rules = RuleSet([Answer()])
    assert rules(completions=["A: 18", "A: 17"], answer=np.array([18, 18])) == [1.0, 0.0]

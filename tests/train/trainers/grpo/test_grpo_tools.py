"""Tools, really called: what TRL's own loop makes of several turns is packed, and trained to TRL's weights."""

from typing import Any

import pytest
import torch
import trl

import trl_ext
from tests import tool_task
from trl_ext import RuleSet
from trl_ext.rewards import Answer, Call, Length

torch.set_num_threads(1)


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def calls(completions: list[Any], **_: Any) -> list[float]:
    """Read the messages, which a rule does not see: how many called a tool."""
    return [sum(bool(message.get("tool_calls")) for message in messages) / 4 for messages in completions]


def rules() -> RuleSet:
    return RuleSet([Answer(gold="answer"), Length(high=1, slack=4, unit="words", weight=0.3)])


REWARDS = {"a function": lambda: length, "rules and a function": lambda: [rules(), calls]}


@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS.keys())
def test_several_turns_are_packed_and_train_to_trls_weights(rewards, tmp_path):
    theirs = tool_task.trained(tool_task.trainer(trl, tmp_path, rewards()))
    for budget in (None, 128):
        subject = tool_task.trainer(trl_ext, tmp_path, rewards(), packing=True, max_tokens_per_forward=budget)
        assert (tool_task.trained(subject) - theirs).abs().max() <= 1e-6
        tool_task.check_packed(subject)


def is_number(row: Any) -> float:
    return float(row.text.isdigit())


def test_a_rule_reads_the_last_turn_and_no_result_of_a_tool(tmp_path):
    script = tool_task.Script(first=(tool_task.call("fail", 3, 4) + " <eos>", "9 <eos>"), again=0.0, most=1)
    subject = tool_task.trainer(
        trl_ext, tmp_path, RuleSet([Call(is_number, isolate=False)]), script=script, max_steps=1
    )
    subject.train()
    (step,) = [entry for entry in subject.state.log_history if "loss" in entry]
    assert step["tools/failure_frequency"] == 1 and step["rewards/is_number/mean"] == 1


def test_results_of_tools_get_no_loss(tmp_path):
    """Turns that end with a result: another result of the tool changes no weight."""

    def trained(result: str) -> tuple[Any, torch.Tensor]:
        def add(a: int, b: int) -> str:
            """
            Add.

            Args:
                a: A number.
                b: Another number.
            """
            return result

        script = tool_task.Script(first=(tool_task.call("add", 3, 4) + " <eos>", "9 8 7 <eos>"), again=0.0)
        subject = tool_task.trainer(
            trl_ext,
            tmp_path,
            lambda completions, **_: [float(i % 3) for i, _ in enumerate(completions)],
            dict(tools=[add]),
            script=script,
            max_completion_length=13,  # 8 tokens of a call, 4 of its results, one that opens a turn without a word
            max_steps=1,
            packing=True,
        )
        return subject, tool_task.trained(subject)

    one, other = (trained(result) for result in ("1 2 3", "4 5 6"))
    assert (one[1] - other[1]).abs().max() == 0
    tool_task.check_packed(one[0])

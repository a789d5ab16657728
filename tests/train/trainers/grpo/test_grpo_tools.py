"""Tools and environments: what TRL's own loop makes of several turns is packed, and trained to TRL's weights."""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import grpo_trainers, tool_task
from trl_ext import RuleSet
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer, Call, Length


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


# Environments -------------------------------------------------------------------------------------------------------

LEVELS = Dataset.from_dict({"level": list(range(16)), "answer": [str(i) for i in range(16)]})


class Sums:
    """Asks for a sum, adds up what is called, and scores how near its total came."""

    def reset(self, level: int = 0, **_: Any) -> str | None:
        self.level, self.total = level, 0
        return f"{level} + {level} ="

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float | None:
        return 1 / (1 + abs(self.total - 2 * self.level))


class Quiet(Sums):
    """Says nothing at a reset, and has no opinion of some rollouts."""

    def reset(self, level: int = 0, **_: Any) -> None:
        super().reset(level)

    def get_reward(self) -> float | None:
        return super().get_reward() if self.total else None


class Failing:
    """Another tool, which fails; scored by no one but the functions beside it."""

    def reset(self, **_: Any) -> str:
        return "error ="

    def fail(self, a: int, b: int) -> int:
        """
        Fail.

        Args:
            a: A number.
            b: Another number.
        """
        raise ValueError("error")


CASES = {
    "it makes the prompt": dict(rows=LEVELS, options=dict(environment_factory=Sums)),
    "beside a tool and rules": dict(
        rewards=lambda: RuleSet([Answer(gold="answer", weight=0.5)]),
        options=dict(environment_factory=Sums, tools=[tool_task.fail]),
    ),
    "silent, and without a score": dict(options=dict(environment_factory=Quiet)),
    "one of several for each row": dict(
        rows=LEVELS.add_column("environment", ["sums", "fails"] * 8),
        rewards=lambda: RuleSet([Answer(gold="answer", weight=0.5)]),
        options=dict(environment_factory={"sums": Sums, "fails": Failing}),
    ),
}


def trainer(library, tmp_path, rewards=None, **changes):
    return tool_task.trainer(library, tmp_path, rewards and rewards(), **changes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_its_turns_are_packed_and_train_to_trls_weights(case, tmp_path):
    budget = {"max_tokens_per_forward": 128} if "rows" in case else {}
    subject = trainer(trl_ext, tmp_path, packing=True, **budget, **case)
    ours, theirs = tool_task.trained(subject), tool_task.trained(trainer(trl, tmp_path, **case))
    assert (ours - theirs).abs().max() <= 1e-6
    tool_task.check_packed(subject)


def test_a_row_is_offered_the_tools_of_its_own_environment(tmp_path):
    subject = trainer(trl_ext, tmp_path, max_steps=1, **CASES["one of several for each row"])
    subject.train()
    assert {tool.__name__ for tool in subject._env_tools["sums"]} == {"add"}
    assert {tool.__name__ for tool in subject._env_tools["fails"]} == {"fail"}
    # `lost` is nobody's, `fail` is unknown to the sums, and `add` to the other: all of that is a result, not an error.
    (step,) = [entry for entry in subject.state.log_history if "loss" in entry]
    assert 0.5 < step["tools/failure_frequency"] < 1


def test_what_an_environment_raises_ends_the_run_with_its_words_and_a_score_with_its_name(tmp_path):
    class Broken(Sums):
        def reset(self, **_: Any) -> str:
            raise OSError("the game server is away")

    class Unscored(Sums):
        def get_reward(self) -> float:
            raise KeyError("total")

    with pytest.raises(OSError, match="the game server is away"):
        trainer(trl_ext, tmp_path, rows=LEVELS, options=dict(environment_factory=Broken)).train()
    with pytest.raises(RuleError, match=r"On rank 0 the reward 'Unscored' raised:[\s\S]*KeyError: 'total'"):
        trainer(trl_ext, tmp_path, rows=LEVELS, options=dict(environment_factory=Unscored)).train()


def test_rows_without_a_prompt_and_without_an_environment_are_refused(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt'"):
        grpo_trainers.trainer(tmp_path, data=LEVELS)

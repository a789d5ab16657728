"""Environments that own the data: TRL's loop calls their tools, and GRPOTrainer packs and trains to TRL's weights."""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny, tool_task
from trl_ext import RuleSet
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer

torch.set_num_threads(1)

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


CASES: dict[str, dict[str, Any]] = {
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


def trainer(library: Any, tmp_path: Any, rewards: Any = None, **changes: Any) -> Any:
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


def test_a_reset_that_raises_ends_the_run_with_its_own_error(tmp_path):
    class Broken(Sums):
        def reset(self, **_: Any) -> str:
            raise OSError("the game server is away")

    with pytest.raises(OSError, match="the game server is away"):
        trainer(trl_ext, tmp_path, rows=LEVELS, options=dict(environment_factory=Broken)).train()


def test_a_score_that_raises_ends_the_run_with_the_name_of_the_environment(tmp_path):
    class Unscored(Sums):
        def get_reward(self) -> float:
            raise KeyError("total")

    with pytest.raises(RuleError, match=r"On rank 0 the reward 'Unscored' raised:[\s\S]*KeyError: 'total'"):
        trainer(trl_ext, tmp_path, rows=LEVELS, options=dict(environment_factory=Unscored)).train()


def test_rows_without_a_prompt_and_without_an_environment_are_refused(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt'"):
        trl_ext.GRPOTrainer(
            tiny.model("llama"),
            lambda completions, **_: [0.0] * len(completions),
            trl_ext.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False),
            LEVELS,
            processing_class=tiny.tokenizer(),
        )

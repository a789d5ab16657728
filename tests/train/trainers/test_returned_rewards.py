"""What reward functions return and what they ask for: where it is no reward, one sentence names the function."""

import asyncio
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch

from tests import grpo_trainers, ppo_trainers
from trl_ext.errors import DataError, RuleError
from trl_ext.trainers.grpo.rewards import guard, raise_together

# What is returned for two completions, and how the sentence goes on.
NO_REWARDS = [
    (None, "None for 2 completions"),
    (0.5, "a number, 0.5, for 2 completions"),
    (np.array(0.5), "a number, array(0.5), for 2 completions"),
    (torch.tensor(0.5), "a number, tensor(0.5000), for 2 completions"),
    ("ab", "text, 'ab', for 2 completions"),
    ({"a": 1.0, "b": 0.0}, "a dict, {'a': 1.0, 'b': 0.0}, for 2 completions"),
    ({0.5, 1.0}, "a set, {0.5, 1.0}, for 2 completions"),
    ([1.0], "1 values for 2 completions"),
    ([1.0, "0.5"], "text, '0.5', for completion 1"),
    ([{"score": 1.0}, 0.0], "a dict, {'score': 1.0}, for completion 0"),
    ([1.0, 1j], "a complex, 1j, for completion 1"),
    ([1.0, torch.tensor([1.0, 2.0])], "a Tensor, tensor([1., 2.]), for completion 1"),
    (np.array(["1.0", "0.5"]), "text, "),
    (pd.DataFrame({"a": [1.0], "b": [2.0]}), "text, 'a', for completion 0"),
]
REWARDS = [
    np.array([1.0, 0.5]),
    torch.tensor([[1.0], [0.5]]),
    pd.Series([1.0, 0.5]),
    (one for one in (True, 0.5)),
    (1, 0.5),
]


def outcome(returned, *, is_async, takes_turns):
    """What the guard of GRPO, or of PPO, which takes turns, hands on."""

    def scores(completions, **_):
        return returned

    async def scores_later(completions, **_):
        return returned

    guarded = guard(scores_later if is_async else scores, "mine", takes_turns)
    found = guarded(completions=["a", "b"])
    found = asyncio.run(found) if is_async else found
    raise_together([guarded], rank=0)
    return found


@pytest.mark.parametrize("takes_turns", [False, True], ids=["GRPO", "PPO"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("returned", "words"), NO_REWARDS, ids=[words for _, words in NO_REWARDS])
def test_what_is_no_reward_is_one_sentence_with_function_file_and_line(returned, words, is_async, takes_turns):
    with pytest.raises(RuleError) as caught:
        outcome(returned, is_async=is_async, takes_turns=takes_turns)
    said = str(caught.value).split("raised:\n")[1]
    assert re.match(rf"The reward 'mine' \({re.escape(__file__)}, line \d+\) returned {re.escape(words)}", said)
    assert said.endswith(". Return a list of one float, or None, per completion.") and "\n" not in said
    assert caught.value.__cause__ is None  # no second traceback, which would hide the sentence


@pytest.mark.parametrize("returned", REWARDS, ids=lambda one: type(one).__name__)
def test_every_sequence_of_numbers_is_rewards(returned):
    assert [float(one) for one in outcome(returned, is_async=False, takes_turns=False)] == [1.0, 0.5]


# Training ---------------------------------------------------------------------------------------------------------


def grpo(folder, *rewards, **changes):
    return grpo_trainers.trainer(folder, rewards=list(rewards), **changes)


def ppo(folder, *rewards, **changes):
    return ppo_trainers.trainer("head", folder, reward_funcs=list(rewards), **changes)


def returns(value, name="mine", steps=10**9):
    """A reward function that returns this for each completion in so many calls, and a reward from then on."""
    calls = []

    def function(completions, completion_ids, **_):
        calls.append(1)
        return [value] * len(completions) if len(calls) <= steps else grpo_trainers.reward(completion_ids)

    function.__name__ = name
    return function


@pytest.mark.parametrize("made", [grpo, ppo])
def test_a_run_ends_with_the_sentence(made, tmp_path):
    with pytest.raises(RuleError, match=r"'mine' \(.*, line \d+\) returned text, '1.0', for completion 0. Return"):
        made(tmp_path, returns("1.0")).train()


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("made", [grpo, ppo])
def test_a_run_without_any_reward_ends_in_its_first_step(made, value, tmp_path):
    trainer = made(tmp_path, returns(value), gradient_accumulation_steps=2)
    with pytest.raises(DataError, match="'mine' scored no completion of the first step: it returned None"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("made", [grpo, ppo])
def test_beside_others_or_where_it_is_meant_it_is_said_and_the_run_goes_on(made, tmp_path, caplog):
    made(tmp_path / "beside", returns(None), grpo_trainers.reward, max_steps=1).train()
    meant = returns(None, name="meant")
    meant.on_unscored = "warn"
    made(tmp_path / "meant", meant, max_steps=1).train()
    said = [m for m in caplog.messages if "scored no completion" in m]
    assert ["'mine'" in said[0], "'meant'" in said[1], len(said)] == [True, True, 2]

"""Reward functions behind the guard."""

import asyncio
import math

import pytest
import torch

from trl_ext.errors import RuleError
from trl_ext.trainers.checks import check_launch
from trl_ext.trainers.grpo.rewards import AsyncGuardedReward, guard, raise_together


def test_a_reward_passes_as_it_is():
    assert guard(lambda completions, **_: [1.0, None], "r")(completions=["a", "b"]) == [1.0, None]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_no_infinity_passes(bad):
    assert guard(lambda completions, **_: [bad, 1.0], "r")(completions=["a", "b"]) == [None, 1.0]


def test_an_exception_waits_until_all_ranks_have_gathered():
    def broken(completions, **_):
        raise ZeroDivisionError("by row 3")

    reward = guard(broken, "my_reward")
    assert reward(completions=["a", "b"]) == [0.0, 0.0]
    with pytest.raises(RuleError, match=r"(?s)rank 0 the reward 'my_reward' raised.*in broken.*by row 3") as caught:
        raise_together([reward], num_processes=1, rank=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_wrong_number_of_rewards_is_refused_with_both_numbers():
    reward = guard(lambda completions, **_: [1.0], "r")
    reward(completions=["a", "b"])
    with pytest.raises(RuleError, match="returned 1 values for 2 completions"):
        raise_together([reward], num_processes=1, rank=0)


def test_rewards_without_failure_raise_nothing():
    raise_together([guard(lambda completions, **_: [1.0], "r")], num_processes=1, rank=0)


def test_an_asynchronous_reward_stays_asynchronous():
    async def reward(completions, **_):
        return [2.0]

    guarded = guard(reward, "r")
    assert isinstance(guarded, AsyncGuardedReward)
    assert asyncio.run(guarded(completions=["a"])) == [2.0]


def test_a_reward_model_is_left_alone():
    model = torch.nn.Linear(1, 1)
    assert guard(model, "r") is model


class _Args:
    world_size = 1


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launch(_Args())  # a cluster's own variable: nothing was launched
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="set use_cpu: true"):
        check_launch(_Args())


def test_fewer_than_one_process_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="fewer than one process"):
        check_launch(_Args())

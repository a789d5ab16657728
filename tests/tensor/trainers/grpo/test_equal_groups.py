"""Which groups count as equal: by their rewards, up to rounding."""

import math

import pytest
import torch

from trl_ext.trainers.generation.groups import equal_groups
from trl_ext.trainers.ppo.objective.equations import less_the_others, standardised

CONSTANTS = (0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1 / 3, 1.0, 1.2, -1.2, 1e4)
NAN = math.nan


def is_equal(*rewards, dtype=torch.float32):
    (found,) = equal_groups(torch.tensor(rewards, dtype=dtype)[:, None], len(rewards)).tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_equal_rewards_are_equal_whatever_they_are(dtype):
    assert all(is_equal(*[constant] * 8, dtype=dtype) for constant in CONSTANTS)


def test_sums_that_differ_by_rounding_are_equal():
    assert is_equal(0.1 + 0.2, 0.3, 0.3, 0.3, dtype=torch.float64)
    assert is_equal(0.1 + 0.2 - 0.3, 0.0, 0.0, dtype=torch.float64)
    assert is_equal(1e4, 1e4 + 0.001, 1e4)


@pytest.mark.parametrize("size", CONSTANTS[1:])
def test_a_difference_of_a_millionth_or_more_is_one(size):
    assert not is_equal(size, size, size * (1 + 3e-6))
    assert not is_equal(0.0, 0.0, 1e-5 * size)


def test_completions_without_a_reward_are_left_out():
    assert is_equal(NAN, NAN) and is_equal(0.7, NAN, 0.7) and is_equal(NAN, 0.3)
    assert not is_equal(NAN, 0.3, 0.4)


def test_each_column_has_to_be_equal_in_each_group():
    rewards = torch.tensor([[0.7, 1.0], [0.7, 1.0], [0.7, 0.0], [0.7, 1.0]])
    assert equal_groups(rewards, 2).tolist() == [True, False]
    assert equal_groups(rewards[:, :1], 2).tolist() == [True, True]


@pytest.mark.parametrize("estimator", [less_the_others, standardised])
def test_ppos_groups_of_equal_rewards_have_advantages_of_0(estimator):
    totals = torch.tensor([[constant] * 8 for constant in CONSTANTS], dtype=torch.float64)
    assert estimator(totals.flatten(), 8).tolist() == [0.0] * totals.numel()
    unscored = estimator(torch.tensor([0.1 + 0.2, NAN, 0.3], dtype=torch.float64), 3).tolist()
    assert unscored[::2] == [0.0, 0.0] and math.isnan(unscored[1])

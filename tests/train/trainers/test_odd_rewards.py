"""Rewards that float32 cannot square: such completions are not scored, which is said, and weights stay finite."""

import itertools
import logging
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests import grpo_trainers, ppo_trainers
from trl_ext import RuleSet
from trl_ext.rewards import LARGEST, Row, Rule, Verdict
from trl_ext.trainers.grpo.rewards import guard, raise_together

BEYOND = (
    *(1e16, -1e16, 3e38, -3e38, 1e39, -1e39, 1e308, -1e308, math.inf, -math.inf, math.nan, 10**400, -(10**400)),
    *(np.float64(1e39), np.float64("nan"), np.float32("inf"), torch.tensor(1e39), torch.tensor(-torch.inf)),
    *(Decimal("1e39"), Decimal("1e400"), Decimal("NaN"), Fraction(10**400)),
)
WITHIN = (
    *(0, 1.0, -2, True, False, LARGEST, -LARGEST, 5e-324, np.float64(0.5), np.float32(-1), np.int64(3)),
    *(np.bool_(True), torch.tensor(0.25), Decimal("0.5"), Fraction(1, 3)),
)


def scored(value):
    """What the guard makes of one value beside a 1.0, alone and as the first of two turns."""
    found = []
    for given in (value, [value, 0.5]):
        reward = guard(lambda completions, given=given, **_: [given, 1.0], "odd", takes_turns=True)
        first, second = reward(completions=["a", "b"])
        raise_together([reward], rank=0)
        assert second == 1.0
        assert reward.turns[1] is None and (first is None or torch.tensor(float(first)).isfinite())
        assert (reward.turns[0] is None) == (first is None or given is value)
        found.append(first)
    return found


@pytest.mark.parametrize("value", BEYOND, ids=repr)
def test_a_value_that_is_out_of_bounds_is_no_score(value):
    assert scored(value) == [None, None]


@pytest.mark.parametrize("value", WITHIN, ids=repr)
def test_a_value_within_bounds_passes_as_it_is(value):
    alone, turns = scored(value)
    assert alone is value
    assert turns == (pytest.approx(float(value) + 0.5) if float(value) + 0.5 <= LARGEST else None)


# Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Odd(Rule):
    """Gives every fifth row a value out of bounds."""

    tier = "inline"
    rows: itertools.count
    values: itertools.cycle

    def score(self, row: Row) -> Verdict:
        return Verdict(next(self.values) if next(self.rows) % 5 == 0 else sum(row.completion_ids) % 17 / 17)


def odd_rewards():
    """A reward function and a set of two rules, whose values are out of bounds in some rows of every batch."""
    values = itertools.cycle(BEYOND)

    def odd_reward(completion_ids, **_):
        rewards = grpo_trainers.reward(completion_ids)
        rewards[1] = next(values)
        return rewards

    floats = itertools.cycle([value for value in BEYOND if isinstance(value, float)])
    rules = [Odd(rows=itertools.count(), values=floats, name=name) for name in ("odd", "odder")]
    return [odd_reward, RuleSet(rules)]


def train_grpo(folder):
    return grpo_trainers.trainer(folder, rewards=odd_rewards(), max_steps=len(BEYOND), beta=0.0)


def train_ppo(folder):
    return ppo_trainers.trainer("head", folder, reward_funcs=odd_rewards(), max_steps=len(BEYOND))


@pytest.fixture(autouse=True)
def nothing_was_warned_of():
    logging.Logger.warning_once.cache_clear()


@pytest.mark.parametrize("made", [train_grpo, train_ppo])
def test_weights_and_logs_stay_finite_and_it_is_said(made, tmp_path, caplog):
    subject = made(tmp_path)
    before = grpo_trainers.weights(subject)
    subject.train()
    after = grpo_trainers.weights(subject)
    assert after.isfinite().all() and (after - before).abs().max() > 1e-4
    for log in subject.state.log_history[:-1]:
        assert all(math.isfinite(log[key]) for key in ("loss", "grad_norm", "reward", "reward_std") if key in log), log
    assert sum("'odd_reward' gave NaN, infinity or more than 1e+15" in m for m in caplog.messages) == 1


@pytest.mark.parametrize("made", [train_grpo, train_ppo])
def test_a_weight_that_carries_rewards_out_of_bounds(made, tmp_path, caplog):
    def a_million(completion_ids, **_):
        return [1e6 * value for value in grpo_trainers.reward(completion_ids)]

    rewards, settings = [a_million, grpo_trainers.reward], dict(reward_weights=[1e14, 1.0])
    if made is train_grpo:
        subject = grpo_trainers.trainer(tmp_path, rewards=rewards, **settings)
    else:
        subject = ppo_trainers.trainer("head", tmp_path, reward_funcs=rewards, **settings)
    subject.train()
    assert grpo_trainers.weights(subject).isfinite().all()
    assert 0 < subject.state.log_history[0]["reward"] < 1
    assert sum("'a_million'" in m and "its weight 1e+14" in m for m in caplog.messages) == 1

"""Advantages without a critic: by hand, and against figures that verl's and OpenRLHF's own functions gave.

Both were run on the inputs below: verl at commit 1dda039b9 (trainer/ppo/core_algos.py), OpenRLHF at 3c3be623
(trainer/ppo_utils/experience_maker.py). OpenRLHF whitens with the population's variance, verl and this project with
the sample's, so its figures are compared without the factor between the two.
"""

import math

import pytest
import torch

from trl_ext.trainers.ppo.objective.equations import (
    generalized_advantages,
    kl_estimate,
    less_the_others,
    rewards_to_come,
    shaped_rewards,
    spread_over_tokens,
    standardised,
    whiten,
)

torch.set_num_threads(1)

NAN = math.nan
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0.0]])
SCORES = torch.tensor([1.0, -0.5, 0.25, 2.0])
LOGPS = torch.tensor([[-0.5, -1.0, -0.25, -2.0], [-0.75, -0.1, 0, 0], [-1.5, -0.3, -0.6, 0], [-0.9, 0, 0, 0]])
REF_LOGPS = torch.tensor([[-0.75, -0.5, -0.25, -1.0], [-0.25, -0.6, 0, 0], [-1.0, -0.8, -0.2, 0], [-1.4, 0, 0, 0]])
VALUES = torch.tensor([[0.3, 0.1, -0.2, 0.4], [0.5, 0.25, 0, 0], [-0.1, 0.2, 0.6, 0], [0.7, 0, 0, 0]])
GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.1
NUM_TOKENS = int(MASK.sum())


def rewards(kl_coef: float = KL_COEF) -> torch.Tensor:
    return shaped_rewards(SCORES, kl_estimate(LOGPS, REF_LOGPS, "k1"), MASK, kl_coef)


def close(ours: torch.Tensor, theirs: list[list[float]]) -> None:
    width = max(map(len, theirs))
    expected = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in theirs])
    torch.testing.assert_close(ours * MASK, expected, atol=1e-6, rtol=0)


def test_gae_is_verls():
    advantages, returns = generalized_advantages(rewards(), VALUES, MASK, GAMMA, LAM)
    close(
        whiten(advantages, MASK),
        [
            [-0.10232396, 0.44106334, 1.18596923, 0.67235768],
            [-1.44558370, -1.44417286],
            [0.21814455, -0.22110042, -0.75277287],
            [1.44841886],
        ],
    )
    close(
        returns,
        [[0.45097771, 0.63608015, 0.86400014, 1.1], [-0.301, -0.55], [0.27809599, 0.26679999, 0.29], [1.95]],
    )


def test_reinforce_pp_is_verls():
    to_come = rewards_to_come(rewards(), MASK, GAMMA)
    close(to_come, [[0.8219, 0.941, 0.99, 1.1], [-0.445, -0.55], [0.2399, 0.211, 0.29], [1.95]])
    close(
        whiten(to_come, MASK),
        [
            [0.35259980, 0.50987130, 0.57457578, 0.71983075],
            [-1.32034123, -1.45899379],
            [-0.41593102, -0.45409349, -0.34977400],
            [1.84225547],
        ],
    )


def test_rloo_is_verls():
    totals = rewards().sum(dim=1)
    close(
        spread_over_tokens(less_the_others(totals, 2), MASK),
        [[1.625] * 4, [-1.625] * 2, [-1.66] * 3, [1.66]],
    )


def test_grpo_is_verls():
    close(
        spread_over_tokens(standardised(rewards().sum(dim=1), 2), MASK),
        [[0.70710617] * 4, [-0.70710617] * 2, [-0.70710623] * 3, [0.70710623]],
    )


def test_remax_is_verls():
    baselines = torch.tensor([0.5, 0.5, -0.25, -0.25])
    close(
        rewards_to_come(rewards(), MASK) - baselines[:, None],
        [[0.625, 0.65, 0.6, 0.6], [-1.0, -1.05], [0.54, 0.49, 0.54], [2.2]],
    )


def to_sample(whitened: list[list[float]]) -> list[list[float]]:
    """OpenRLHF's whitened figures as whitening with the sample's variance would give them."""
    factor = math.sqrt((NUM_TOKENS - 1) / NUM_TOKENS)
    return [[value * factor for value in row] for row in whitened]


def test_gae_is_openrlhfs():
    advantages, _ = generalized_advantages(rewards(), VALUES, MASK, GAMMA, LAM)
    close(
        whiten(advantages, MASK),
        to_sample(
            [
                [-0.10785893, 0.46492162, 1.25012136, 0.70872730],
                [-1.52377915, -1.52229190],
                [0.22994456, -0.23306032, -0.79349232],
                [1.52676761],
            ]
        ),
    )


def test_reinforce_pp_is_openrlhfs():
    close(
        whiten(rewards_to_come(rewards(), MASK, GAMMA), MASK),
        to_sample(
            [
                [0.37167284, 0.53745157, 0.60565609, 0.75876826],
                [-1.39176190, -1.53791451],
                [-0.43842980, -0.47865659, -0.36869419],
                [1.94190788],
            ]
        ),
    )


def test_rloo_without_kl_is_openrlhfs():
    # With a KL, OpenRLHF takes the baseline off the score alone and verl off the whole reward, as we do.
    close(
        spread_over_tokens(less_the_others(rewards(kl_coef=0).sum(dim=1), 2), MASK),
        [[1.5] * 4, [-1.5] * 2, [-1.75] * 3, [1.75]],
    )


@pytest.mark.parametrize("baseline", [less_the_others, standardised])
def test_what_nothing_scored_is_in_no_groups_mean(baseline):
    totals = torch.tensor([1.0, NAN, 3.0, NAN, NAN, 5.0])
    found = baseline(totals, 3)
    expected = baseline(torch.tensor([1.0, 3.0]), 2)
    torch.testing.assert_close(found[[0, 2]], expected)
    assert found[[1, 3, 4]].isnan().all()
    assert found[5] == 0  # alone in its group: nothing compares it


def test_groups_do_not_touch():
    one, other = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-3.0, 0.0, 9.0])
    for baseline in (less_the_others, standardised):
        both = baseline(torch.cat([one, other]), 3)
        torch.testing.assert_close(both, torch.cat([baseline(one, 3), baseline(other, 3)]))


def test_a_group_of_equals_teaches_nothing():
    for baseline in (less_the_others, standardised):
        assert not baseline(torch.full((4,), 0.1), 4).any()


def test_a_row_without_advantage_has_none_at_its_tokens():
    spread = spread_over_tokens(torch.tensor([2.0, NAN]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert spread.tolist() == [[2.0, 0.0], [0.0, 0.0]]

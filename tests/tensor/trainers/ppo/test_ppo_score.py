"""Scores of rules and reward models put together and normalised, against plain loops."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo.scores.combine import MODES, ScoreNormaliser, combine, passing

torch.set_num_threads(1)

NAN = math.nan
RULE_WEIGHTS, MODEL_WEIGHTS = torch.tensor([1.0, 0.5, -0.3]), torch.tensor([0.7, 0.2])


def scored(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rules [32, 3] and models [32, 2], a third of the entries not scored."""
    draw = torch.Generator().manual_seed(seed)
    both = 2 * torch.randn(32, 5, generator=draw)
    both[torch.rand(32, 5, generator=draw) < 0.35] = NAN
    return both[:, :3], both[:, 3:]


def weighted(values, weights) -> float:
    known = [w * v for v, w in zip(values.tolist(), weights.tolist(), strict=True) if not math.isnan(v)]
    return sum(known) if known else NAN


def reference(rules, models, mode, gate_above) -> float:
    rule, model = weighted(rules, RULE_WEIGHTS), weighted(models, MODEL_WEIGHTS)
    if mode == "add":
        known = [part for part in (rule, model) if not math.isnan(part)]
        return sum(known) if known else NAN
    bonus = weighted(1 / (1 + torch.exp(-models.double())), MODEL_WEIGHTS)
    return rule + (0.0 if math.isnan(bonus) else bonus) if rule > gate_above else rule


# Combination ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_scores_are_those_of_plain_loops(mode):
    """Reward models that nobody asked, where the gate is shut, change nothing."""
    for seed, gate_above in itertools.product(range(4), (-1.0, 0.0, 0.8)):
        rules, models = scored(seed)
        expected = [reference(rule, model, mode, gate_above) for rule, model in zip(rules, models, strict=True)]
        if mode == "gate":
            models = models.masked_fill(~passing(rules, RULE_WEIGHTS, gate_above)[:, None], NAN)
        found = combine(rules, RULE_WEIGHTS, models, MODEL_WEIGHTS, mode, gate_above)
        np.testing.assert_allclose(found, expected, atol=1e-6, equal_nan=True)


def test_behind_the_gate_no_failing_completion_scores_above_a_passing_one():
    for seed, gate_above in itertools.product(range(4), (-0.5, 0.0, 1.0)):
        rules, models = scored(seed)
        score = combine(rules, RULE_WEIGHTS, 1000 * models, MODEL_WEIGHTS, "gate", gate_above)
        passed = passing(rules, RULE_WEIGHTS, gate_above)
        assert score[~passed].nan_to_num(nan=-math.inf).max() <= gate_above < score[passed].min()


def test_a_reward_model_adds_between_nothing_and_its_weight():
    models = torch.tensor([[-1e30], [-3.0], [0.0], [3.0], [1e30], [math.inf]])
    found = combine(torch.ones(6, 1), torch.ones(1), models, torch.tensor([0.5]), "gate")
    np.testing.assert_allclose(found, 1 + 0.5 * np.array([0, 0.04742587, 0.5, 0.95257413, 1, 1]), atol=1e-6)


def test_a_sum_at_the_gate_does_not_pass():
    assert passing(torch.tensor([[0.0], [1e-6], [-1.0], [NAN]]), torch.ones(1)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("mode", MODES)
def test_without_reward_models_the_rules_are_the_score(mode):
    assert combine(torch.ones(1, 1), torch.ones(1), torch.zeros(1, 0), torch.zeros(0), mode).tolist() == [1.0]


@pytest.mark.parametrize(("mode", "expected"), [("add", 2.0), ("gate", NAN)])
def test_without_rules_a_sum_has_a_score_and_a_gate_none(mode, expected):
    found = combine(torch.zeros(1, 0), torch.zeros(0), torch.full((1, 1), 2.0), torch.ones(1), mode)
    np.testing.assert_equal(found.numpy(), [expected])


def test_half_precision_is_summed_in_float32():
    rules = torch.tensor([[256.0, 1.0]]).bfloat16()
    weights = torch.ones(2).bfloat16()
    assert combine(rules, weights, torch.zeros(1, 0), torch.zeros(0), "add").tolist() == [257.0]


def test_a_reward_model_that_is_subtracted_cannot_stand_behind_a_gate():
    with pytest.raises(ConfigError, match="takes none below 0"):
        combine(torch.ones(1, 1), torch.ones(1), torch.ones(1, 1), -torch.ones(1), "gate")


def test_one_weight_is_not_taken_for_all():
    with pytest.raises(ConfigError, match="1 weights for 3 rules"):
        passing(torch.ones(2, 3), torch.ones(1))


# Normalisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_running_scores_are_normalised_by_everything_seen(seed):
    draw = np.random.default_rng(seed)
    normaliser, seen = ScoreNormaliser("running"), np.zeros(0)
    for size in (2, 5, 1, 16):
        batch = draw.normal(5.0, 3.0, size).astype(np.float32)
        seen = np.append(seen, batch.astype(np.float64))
        np.testing.assert_allclose(
            normaliser(torch.from_numpy(batch)), (batch - seen.mean()) / seen.std(ddof=1), rtol=1e-6, atol=1e-6
        )


def test_a_first_score_alone_is_left_as_it_is():
    assert ScoreNormaliser("running")(torch.tensor([4.0])).tolist() == [4.0]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_scores_that_are_no_numbers_do_not_enter_the_moments(bad):
    clean, dirty = ScoreNormaliser("running"), ScoreNormaliser("running")
    expected = clean(torch.tensor([1.0, 2.0, 5.0])).tolist()
    found = dirty(torch.tensor([1.0, bad, 2.0, 5.0])).tolist()
    assert [found[0], *found[2:]] == expected
    assert dirty.state_dict() == clean.state_dict()
    np.testing.assert_equal(found[1], bad)


def test_scores_are_clipped():
    found = ScoreNormaliser("none", clip=3.0)(torch.tensor([-8.0, 0.5, math.inf, NAN]))
    np.testing.assert_equal(found.numpy(), [-3.0, 0.5, 3.0, NAN])


def test_clipping_comes_after_the_normalisation():
    scores = torch.tensor([0.0, 0.0, 0.0, 100.0])
    assert ScoreNormaliser("running", clip=1.0)(scores).tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.0])


def test_a_resumed_normaliser_goes_on_as_if_uninterrupted():
    whole, resumed = ScoreNormaliser("running"), ScoreNormaliser("running")
    whole(torch.tensor([0.1, 0.2, 0.7]))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    batch = torch.tensor([3.0, -1.0])
    assert torch.equal(resumed(batch), whole(batch))
    assert resumed.state_dict() == whole.state_dict()


def test_half_precision_scores_become_float32():
    assert ScoreNormaliser()(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == torch.float32

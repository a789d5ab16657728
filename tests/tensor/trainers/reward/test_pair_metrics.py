"""Loss and metrics of scored pairs, against numbers worked out by hand."""

import inspect
import math
import re

import pytest
import torch
from trl.trainer.reward_trainer import RewardTrainer

from trl_ext.trainers.reward.loss import (
    JudgedPair,
    PairStats,
    combined,
    evaluation_metrics,
    judged,
    pair_losses,
    pair_stats,
    rank_correlation,
)

torch.set_num_threads(1)

CHOSEN, REJECTED = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([1.0, 0.5, 3.0])


def stats(chosen, rejected, raw_tokens=0) -> torch.Tensor:
    return pair_stats(torch.tensor(chosen), torch.tensor(rejected), raw_tokens)


def judged_pair(chosen=1.0, rejected=0.0, tokens=(1, 1), gap=None) -> JudgedPair:
    return JudgedPair(chosen, rejected, *tokens, gap)


# Loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_pair_is_minus_log_of_the_probability_that_chosen_wins():
    expected = [-math.log(1 / (1 + math.exp(-lead))) for lead in (1.0, 0.0, -4.0)]
    assert pair_losses(CHOSEN, REJECTED).tolist() == pytest.approx(expected)


def test_a_margin_is_subtracted_from_the_lead():
    margins = torch.tensor([0.5, 0.0, 1.0])
    expected = [-math.log(1 / (1 + math.exp(-lead))) for lead in (0.5, 0.0, -5.0)]
    assert pair_losses(CHOSEN, REJECTED, margins).tolist() == pytest.approx(expected)


def test_centring_adds_the_weighted_square_of_the_sum():
    plain, centred = pair_losses(CHOSEN, REJECTED), pair_losses(CHOSEN, REJECTED, center=0.1)
    assert (centred - plain).tolist() == pytest.approx([0.9, 0.1, 0.4])


def test_losses_of_half_precision_scores_are_in_float32():
    assert pair_losses(CHOSEN.bfloat16(), REJECTED.bfloat16()).dtype == torch.float32


# Statistics -------------------------------------------------------------------------------------------------------


def test_statistics_of_three_pairs():
    found = PairStats(*pair_stats(CHOSEN, REJECTED, raw_tokens=40).tolist())
    # A tie is not correct.
    assert found == PairStats(3.0, 1.0, lead=-3.0, reward=6.0, raw_tokens=40.0, lowest=-1.0, highest=3.0)


def test_metrics_have_trls_names_and_meanings():
    metrics = PairStats(*pair_stats(CHOSEN, REJECTED, 40).tolist()).metrics()
    assert metrics == pytest.approx(
        {"min_reward": -1.0, "mean_reward": 1.0, "max_reward": 3.0, "accuracy": 1 / 3, "margin": -1.0}
    )


def test_metrics_are_all_that_trl_logs_but_its_token_count():
    logged = re.findall(r'self\._metrics\[mode\]\["(\w+)"\]', inspect.getsource(RewardTrainer.compute_loss))
    assert set(PairStats(1, 1, 1, 1, 1, 1, 1).metrics()) | {"num_tokens"} == set(logged)


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    parts = [pair_stats(CHOSEN[:1], REJECTED[:1], 10), pair_stats(CHOSEN[1:], REJECTED[1:], 30)]
    assert torch.equal(combined(torch.stack(parts)), pair_stats(CHOSEN, REJECTED, 40))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_without_pairs_changes_nothing(place):
    parts = [pair_stats(CHOSEN[:1], REJECTED[:1], 10), pair_stats(CHOSEN[1:], REJECTED[1:], 30)]
    parts.insert(place, stats([], [], 0))
    assert torch.equal(combined(torch.stack(parts)), pair_stats(CHOSEN, REJECTED, 40))


def test_statistics_do_not_keep_the_graph():
    scores = CHOSEN.clone().requires_grad_()
    assert not pair_stats(scores, REJECTED, 0).requires_grad


# Evaluation -------------------------------------------------------------------------------------------------------


def test_rank_correlation_of_ranks_with_ties():
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5 over the root of 4.5 * 5.
    assert rank_correlation([10, 20, 20, 30], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(("order", "correlation"), [([1, 8, 9, 100], 1.0), ([4, 3, 2, 1], -1.0)])
def test_rank_correlation_asks_for_the_order_alone(order, correlation):
    assert rank_correlation([1, 2, 3, 4], order) == pytest.approx(correlation)


@pytest.mark.parametrize(("a", "b"), [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5]), ([], []), ([1], [1])])
def test_what_is_constant_has_no_rank_correlation(a, b):
    assert rank_correlation(a, b) is None


def test_accuracy_where_rules_agree_and_where_they_do_not():
    pairs = [
        judged_pair(chosen=1.0, gap=2.0),
        judged_pair(chosen=1.0, gap=0.5),
        judged_pair(chosen=-1.0, gap=1.0),
        judged_pair(chosen=-1.0, gap=-1.0),
        judged_pair(chosen=1.0, gap=0.0),
        judged_pair(chosen=1.0, gap=None),
        judged_pair(chosen=1.0, gap=math.nan),
    ]
    metrics = evaluation_metrics(pairs)
    assert metrics["accuracy_rules_agree"] == pytest.approx(2 / 3)
    assert metrics["accuracy_rules_disagree"] == 0.0
    assert metrics["rules_agree_frac"] == 0.75


def test_what_no_pair_can_tell_is_left_out():
    assert evaluation_metrics([]) == {}
    assert evaluation_metrics([judged_pair(tokens=(1, 1))]) == {}
    assert set(evaluation_metrics([judged_pair(gap=-1.0)])) == {"accuracy_rules_disagree", "rules_agree_frac"}


def test_longer_sides_with_higher_scores_correlate():
    pairs = [judged_pair(3.0, 1.0, (30, 10)), judged_pair(4.0, 2.0, (40, 20))]
    assert evaluation_metrics(pairs) == {"score_length_correlation": pytest.approx(1.0)}


def test_a_batch_is_judged_pair_by_pair():
    examples = [
        {"chosen_ids": [5, 6, 7], "rejected_ids": [5], "rule_gap": 0.5},
        {"chosen_ids": [5], "rejected_ids": [5, 6]},
    ]
    found = judged(examples, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    assert found == [JudgedPair(1.0, 3.0, 3, 1, 0.5), JudgedPair(2.0, 4.0, 1, 2, None)]

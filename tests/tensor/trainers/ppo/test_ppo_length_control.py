"""A reward model's scores without what the completion's length explains, against numpy's line."""

import json
import math

import numpy as np
import pytest
import torch

from trl_ext.trainers.ppo.scores.combine import ScoreNormaliser, Scoring
from trl_ext.trainers.ppo.scores.length import LengthControl

torch.set_num_threads(1)


def scored(num: int = 300, slope: float = 0.03) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of which a part is linear in the length, and the lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (num,), generator=draw)
    return torch.randn(num, generator=draw) + slope * lengths, lengths


def test_batches_give_the_line_through_all_of_them():
    scores, lengths = scored()
    control = LengthControl()
    kept = [control(*part) for part in zip(scores.split(60), lengths.split(60), strict=True)][-1]
    slope = np.polyfit(lengths.double().numpy(), scores.double().numpy(), 1)[0]
    assert control.slope == pytest.approx(slope, rel=1e-9)
    expected = scores[-60:].double() - slope * (lengths[-60:] - lengths.double().mean())
    assert torch.allclose(kept.double(), expected, atol=1e-5)


def test_nothing_of_the_length_is_left():
    scores, lengths = scored()
    before, after = np.corrcoef(scores, lengths)[0, 1], np.corrcoef(LengthControl()(scores, lengths), lengths)[0, 1]
    assert before > 0.9 and abs(after) < 1e-6


@pytest.mark.parametrize("lengths", [[5, 5, 5], [7]])
def test_lengths_that_do_not_vary_explain_nothing(lengths):
    scores = torch.arange(len(lengths)).float()
    assert LengthControl()(scores, torch.tensor(lengths)).tolist() == scores.tolist()


def test_what_has_no_score_stays_so_and_moves_nothing():
    scores, lengths = scored(8)
    clean, dirty = LengthControl(), LengthControl()
    clean(scores, lengths)
    odd = torch.tensor([math.nan, math.inf])
    kept = dirty(torch.cat([odd, scores]), torch.cat([torch.tensor([10**6, 1]), lengths]))
    assert dirty == clean
    assert kept[0].isnan() and kept[1] == math.inf


def scoring(**options) -> Scoring:
    normaliser = ScoreNormaliser("running")
    return Scoring(1, [lambda: None] * 2, normaliser, "add", 0.0, controls_length=True, **options)


def test_rules_are_left_alone_and_each_model_has_its_own_line():
    scores, lengths = scored()
    rule = 0.1 * lengths.float()
    weights = torch.tensor([1.0, 0.5, 2.0])
    subject = scoring()
    found = subject.scores(torch.stack([rule, scores, -3 * scores], 1), weights, lengths, is_training=True)
    freed = LengthControl()(scores, lengths)
    n = (freed - freed.mean()) / freed.std()
    assert torch.allclose(found, rule + 0.5 * n - 2.0 * n, atol=1e-4)


def test_the_line_is_saved_and_evaluation_leaves_it_alone():
    scores, lengths = scored()
    table, weights = torch.stack([scores] * 3, 1), torch.ones(3)
    whole, resumed = scoring(), scoring()
    whole.scores(table[:200], weights, lengths[:200], is_training=True)
    state = json.loads(json.dumps(whole.state_dict()))
    whole.scores(table[200:], weights, lengths[200:], is_training=False)
    assert whole.state_dict() == state
    resumed.load_state_dict(state)
    ends = [s.scores(table[200:], weights, lengths[200:], is_training=True) for s in (whole, resumed)]
    assert torch.equal(*ends)


def test_a_run_may_take_up_length_control_later():
    earlier = Scoring(1, [lambda: None] * 2, ScoreNormaliser("running"), "add", 0.0)
    subject = scoring()
    subject.load_state_dict(earlier.state_dict())
    assert subject.state_dict() == scoring().state_dict()


def test_an_ensemble_is_made_of_what_is_left():
    scores, lengths = scored()
    table = torch.stack([torch.zeros_like(scores), scores, scores + 1], 1)
    found = scoring(ensemble="min").scores(table, torch.ones(3), lengths, is_training=True)
    assert abs(np.corrcoef(found, lengths)[0, 1]) < 1e-6

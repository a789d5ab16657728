"""Rewards, advantages, returns and whitening, against float64 loops over the counted tokens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from trl_ext.trainers.ppo.objective.equations import generalized_advantages, shaped_rewards, whiten
from trl_ext.trainers.ppo.targets import ValueErrors

torch.set_num_threads(1)

SEEDS = range(4)


def ragged(seed: int, width: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two random [6, width] and a mask: full, left-padded, right-padded and empty rows, and rows with holes."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, width, generator=draw), torch.randn(6, width, generator=draw)
    mask = torch.ones(6, width)
    mask[1, : width // 3] = 0
    mask[2, width // 2 :] = 0
    mask[3] = 0
    mask[4:] = (torch.rand(2, width, generator=draw) < 0.6).float()
    return x, y, mask


def dirty(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """NaN where the mask is 0."""
    return x.masked_fill(mask == 0, torch.nan)


def counted(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    return x[mask.bool()].double().numpy()


class Ranks:
    """Threads that sum tensors as ranks do; a rank that calls less often than another breaks the barrier."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=120)
        self.parts: dict[int, torch.Tensor] = {}

    def total(self, rank: int):
        def summed(tensor: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = tensor
            self.barrier.wait()
            result = sum(self.parts[i] for i in sorted(self.parts))
            self.barrier.wait()
            return result

        return summed


def on_ranks(function, *parts):
    """What each rank gets from function(*its part, total=...)."""
    ranks = Ranks(len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = [pool.submit(function, *part, total=ranks.total(i)) for i, part in enumerate(parts)]
        return [job.result() for job in jobs]


# Rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_are_the_penalty_and_the_score_at_the_last_counted_token(seed):
    kl, scores, mask = ragged(seed)
    scores = scores[:, 0]
    expected = np.zeros(mask.shape)
    for b in range(len(mask)):
        places = np.flatnonzero(mask[b])
        expected[b, places] = -0.05 * kl[b, places].double().numpy()
        if len(places):
            expected[b, places[-1]] += scores[b].item()
    np.testing.assert_allclose(shaped_rewards(scores, dirty(kl, mask), mask, 0.05), expected, atol=1e-6)


def test_a_row_without_counted_tokens_gets_nothing_not_even_a_score_that_is_not_a_number():
    rewards = shaped_rewards(torch.tensor([torch.nan, 1.0]), torch.ones(2, 3), torch.tensor([[0] * 3, [1] * 3]), 1.0)
    assert rewards.tolist() == [[0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]]


# Advantages -------------------------------------------------------------------------------------------------------


def reference_advantages(rewards, values, mask, gamma, lam) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence A_t = delta_t + gamma * lam * A_t+1 over the counted tokens of each row."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(len(mask)):
        next_value = next_advantage = 0.0
        for t in reversed(np.flatnonzero(mask[b])):
            reward, value = rewards[b, t].double().item(), values[b, t].double().item()
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            next_value = value
            advantages[b, t], returns[b, t] = next_advantage, next_advantage + value
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])
@pytest.mark.parametrize("width", [1, 8, 13])
def test_advantages_and_returns_are_those_of_the_recurrence(width, gamma, lam):
    rewards, values, mask = ragged(0, width)
    found = generalized_advantages(dirty(rewards, mask), dirty(values, mask), mask, gamma, lam)
    for one, expected in zip(found, reference_advantages(rewards, values, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6)


def test_a_thousand_tokens_are_as_exact_as_ten():
    rewards, values, mask = ragged(0, 1000)
    found = generalized_advantages(rewards, values, mask, 1.0, 0.95)
    for one, expected in zip(found, reference_advantages(rewards, values, mask, 1.0, 0.95), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_equals_itself_with_its_uncounted_tokens_cut_out(seed):
    rewards, values, mask = ragged(seed)
    whole = generalized_advantages(rewards, values, mask, 0.97, 0.9)
    for b, kept in enumerate(mask.bool()):
        cut = [x[b, kept][None] for x in (rewards, values, mask)]
        for one, alone in zip(whole, generalized_advantages(*cut, 0.97, 0.9), strict=True):
            assert torch.equal(one[b, kept], alone[0])


@pytest.mark.parametrize(("left", "right"), [(0, 5), (3, 0), (4, 20)])
def test_padding_changes_nothing(left, right):
    batch = ragged(1)
    padded = [torch.nn.functional.pad(x, (left, right)) for x in batch]
    for one, wide in zip(
        generalized_advantages(*batch, 0.97, 0.9), generalized_advantages(*padded, 0.97, 0.9), strict=True
    ):
        assert torch.equal(torch.nn.functional.pad(one, (left, right)), wide)


def test_advantages_and_returns_are_targets_without_gradient():
    rewards, values, mask = ragged(0)
    assert not any(x.requires_grad for x in generalized_advantages(rewards, values.requires_grad_(), mask, 1.0, 0.95))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_in_nothing_out(shape):
    empty = torch.zeros(shape)
    assert all(x.shape == shape for x in generalized_advantages(empty, empty, empty, 1.0, 0.95))
    assert shaped_rewards(torch.zeros(shape[0]), empty, empty, 0.1).shape == shape
    assert whiten(empty, empty).shape == shape


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_the_mask_may_have_any_dtype(kind):
    rewards, values, mask = ragged(2)
    found = generalized_advantages(rewards, values, mask.to(kind), 1.0, 0.95)
    assert torch.equal(found[0], generalized_advantages(rewards, values, mask, 1.0, 0.95)[0])


# Whitening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_whitening_is_by_mean_and_sample_variance_of_the_counted_tokens(seed, shift_mean):
    x, _, mask = ragged(seed)
    x = 3 * x + 2
    kept = counted(x, mask)
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) + (0 if shift_mean else kept.mean())
    found = whiten(dirty(x, mask), mask, shift_mean)
    np.testing.assert_allclose(counted(found, mask), expected, atol=1e-6)
    assert (found[mask == 0] == 0).all()


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_two_ranks_whiten_as_one(cut, shift_mean):
    x, _, mask = ragged(0)
    mask[:1] = 0  # with cut 1 the first rank has no counted token
    parts = [(x[rows], mask[rows], shift_mean) for rows in (slice(0, cut), slice(cut, None))]
    np.testing.assert_allclose(torch.cat(on_ranks(whiten, *parts)), whiten(x, mask, shift_mean), atol=1e-6)


def test_ranks_whitened_alone_differ_from_whitened_together():
    x, _, mask = ragged(0)
    assert not torch.allclose(torch.cat([whiten(x[:3], mask[:3]), whiten(x[3:], mask[3:])]), whiten(x, mask))


def test_a_large_mean_costs_no_digits():
    # Deviations of 0.25 on 4096 are exact in float32, and the square of 4096 swallows that of 0.25.
    x = 4096 + torch.tensor([[0.25, -0.25, 0.25, -0.25]])
    expected = torch.tensor([[1.0, -1.0, 1.0, -1.0]]) * 0.25 / (4 / 3 * 0.25**2) ** 0.5
    np.testing.assert_allclose(whiten(x, torch.ones(1, 4)), expected, atol=1e-6)


@pytest.mark.parametrize(("mask", "expected"), [([0, 0, 0], [0, 0, 0]), ([0, 1, 0], [0, 0, 0])])
def test_one_counted_token_or_none_whitens_to_zero(mask, expected):
    assert whiten(torch.tensor([[3.0, 5.0, 7.0]]), torch.tensor([mask])).tolist() == [expected]


def test_one_counted_token_keeps_its_value_where_the_mean_is_kept():
    assert whiten(torch.tensor([[3.0, 5.0, 7.0]]), torch.tensor([[0, 1, 0]]), shift_mean=False).tolist() == [[0, 5, 0]]


def test_values_that_do_not_vary_whiten_to_zero():
    np.testing.assert_allclose(whiten(torch.full((2, 7), 0.1), torch.ones(2, 7)), 0, atol=1e-6)


def test_half_precision_is_whitened_to_float32():
    x, _, mask = ragged(3)
    assert torch.equal(whiten(x.bfloat16(), mask), whiten(x.bfloat16().float(), mask))


# Explained variance -----------------------------------------------------------------------------------------------


def errors_of(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, total=lambda x: x) -> ValueErrors:
    return ValueErrors.of(values, returns, mask, total)


def test_explained_variance_is_one_less_the_part_that_is_left(subtests):
    for seed in SEEDS:
        noise, returns, mask = ragged(seed)
        whole = counted(returns, mask)
        for name, values in {
            "some": returns + 0.5 * noise + 2,
            "all": returns,
            "none": torch.full_like(returns, 0.3),
        }.items():
            with subtests.test(name, seed=seed):
                found = errors_of(dirty(values, mask), dirty(returns, mask), mask).metrics()
                expected = 1 - (whole - counted(values, mask)).var() / whole.var()
                assert found == {"ppo/explained_variance": pytest.approx(expected, abs=1e-6)}


@pytest.mark.parametrize("cut", [1, 3])
def test_two_ranks_explain_as_much_as_one(cut):
    values, returns, mask = ragged(1)
    mask[:1] = 0
    parts = [(values[rows], returns[rows], mask[rows]) for rows in (slice(0, cut), slice(cut, None))]
    expected = errors_of(values, returns, mask).metrics()
    for found in on_ranks(errors_of, *parts):
        assert found.metrics() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cut", [1, 3])
def test_two_batches_explain_as_much_as_one(cut):
    values, returns, mask = ragged(1)
    first, second = (errors_of(*(x[rows] for x in (values, returns, mask))) for rows in (slice(cut), slice(cut, None)))
    both, whole = first.merged(second), errors_of(values, returns, mask)
    assert both.metrics() == pytest.approx(whole.metrics(), abs=1e-6)
    assert both.mean_square() == pytest.approx(np.square(counted(returns - values, mask)).mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7])
def test_returns_that_do_not_vary_leave_nothing_to_explain(num_tokens, dtype):
    values = torch.randn(1, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = (torch.arange(7) < num_tokens)[None]
    found = errors_of(values, torch.full((1, 7), 0.1, dtype=dtype), mask).metrics()
    assert found == {"ppo/explained_variance": 0}

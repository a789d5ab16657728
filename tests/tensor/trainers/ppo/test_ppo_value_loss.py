"""The clipped value loss and its gradient, against float64 loops."""

import numpy as np
import pytest
import torch

from trl_ext.trainers.ppo.objective.equations import clipped_value_loss

torch.set_num_threads(1)

CLIPS = [None, 0.05, 0.2, 10.0]


def ragged(seed: int) -> tuple[torch.Tensor, ...]:
    """Values, old values, returns [4, 9] and a mask with ragged ends, holes and an empty row."""
    draw = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(4, 9, generator=draw) for _ in range(3))
    lengths = torch.tensor([9, 5, 1, 0])
    mask = (torch.arange(9) < lengths[:, None]) & (torch.rand(4, 9, generator=draw) < 0.8)
    return values, old + 0.3 * values, returns, mask.int()


def reference(values, old, returns, mask, clip, normalizer) -> tuple[float, np.ndarray, int]:
    """Loss, its gradient by hand, and the number of clipped tokens."""
    loss, gradient, num_clipped = 0.0, np.zeros(values.shape), 0
    for b, t in np.argwhere(mask.numpy()):
        v, o, r = (x[b, t].double().item() for x in (values, old, returns))
        near = v if clip is None else min(max(v, o - clip), o + clip)
        plain, clipped = (v - r) ** 2, (near - r) ** 2
        loss += 0.5 * max(plain, clipped) / normalizer
        if clipped > plain:
            num_clipped += 1  # the larger term does not depend on the value
        else:
            gradient[b, t] = (v - r) / normalizer
    return loss, gradient, num_clipped


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_and_count_are_those_of_plain_loops(seed, clip):
    values, old, returns, mask = ragged(seed)
    values.requires_grad_()
    found = clipped_value_loss(values, old, returns, mask, clip, normalizer=13)
    found.loss.backward()
    loss, gradient, num_clipped = reference(values, old, returns, mask, clip, 13)
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(values.grad, gradient, atol=1e-6)
    assert found.num_clipped.item() == num_clipped
    assert clip != 0.2 or 0 < num_clipped < mask.sum()


@pytest.mark.parametrize("clip", CLIPS)
def test_what_stands_at_uncounted_tokens_reaches_neither_loss_nor_gradient(clip):
    values, old, returns, mask = ragged(0)
    clean = clipped_value_loss(values, old, returns, mask, clip, 13)
    dirty = [x.masked_fill(mask == 0, bad) for x, bad in ((values, torch.nan), (old, torch.inf), (returns, torch.nan))]
    dirty[0].requires_grad_()
    found = clipped_value_loss(*dirty, mask, clip, 13)
    found.loss.backward()
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(found.num_clipped, clean.num_clipped)
    assert (dirty[0].grad[mask == 0] == 0).all()


@pytest.mark.parametrize("clip", CLIPS)
def test_a_batch_without_counted_tokens_gives_zero_and_zero_gradient(clip):
    values, old, returns, mask = ragged(0)
    values.requires_grad_()
    found = clipped_value_loss(values, old, returns, torch.zeros_like(mask), clip, 13)
    found.loss.backward()
    assert (found.loss, found.num_clipped, values.grad.abs().sum()) == (0, 0, 0)


@pytest.mark.parametrize("clip", CLIPS)
def test_losses_of_micro_batches_add_up_to_that_of_the_batch(clip):
    batch = ragged(1)
    whole = clipped_value_loss(*batch, clip, 13)
    parts = [clipped_value_loss(*(x[rows] for x in batch), clip, 13) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), abs=1e-6)
    assert sum(part.num_clipped for part in parts) == whole.num_clipped


def test_values_that_have_not_moved_are_not_clipped():
    values, _, returns, mask = ragged(0)
    found = clipped_value_loss(values, values.clone(), returns, mask, 1e-3, 13)
    assert found.num_clipped == 0
    assert torch.equal(found.loss, clipped_value_loss(values, values, returns, mask, None, 13).loss)


def test_half_precision_values_have_a_float32_loss():
    *numbers, mask = ragged(2)
    halves = [x.bfloat16() for x in numbers]
    found = clipped_value_loss(*halves, mask, 0.2, torch.tensor(13))
    assert torch.equal(found.loss, clipped_value_loss(*(x.float() for x in halves), mask, 0.2, 13).loss)

"""Which KL's gradient each estimator has, in the reward and in the loss: all actions of a small policy, weighed."""

import pytest
import torch

from trl_ext.trainers.ppo.equations import kl_estimate

torch.set_num_threads(1)


@pytest.fixture
def policies():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(0)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def kl(p, q):
    return (p.exp() * (p - q)).sum()


def in_loss(logits, ref, estimator):
    """The mean gradient of the estimate over actions that the policy samples."""
    logps = logits.log_softmax(0)
    return gradient((logps.detach().exp() * kl_estimate(logps, ref, estimator)).sum(), logits)


def in_reward(logits, ref, estimator):
    """The mean policy gradient of the estimate as a penalty, which is a number and has no gradient of its own."""
    logps = logits.log_softmax(0)
    return gradient((logps.detach().exp() * kl_estimate(logps, ref, estimator).detach() * logps).sum(), logits)


def test_k1_in_the_reward_and_k2_in_the_loss_have_the_kls_gradient(policies):
    logits, ref = policies
    expected = gradient(kl(logits.log_softmax(0), ref), logits)
    torch.testing.assert_close(in_reward(logits, ref, "k1"), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(in_loss(logits, ref, "k2"), expected, rtol=0, atol=1e-6)
    assert in_loss(logits, ref, "k1").abs().max() < 1e-6


def test_k3_has_the_gradients_that_its_docstring_names(policies):
    logits, ref = policies
    logps = logits.log_softmax(0)
    forward, backward = (gradient(one, logits) for one in (kl(logps, ref), kl(ref, logits.log_softmax(0))))
    torch.testing.assert_close(in_loss(logits, ref, "k3"), backward, rtol=0, atol=1e-6)
    torch.testing.assert_close(in_reward(logits, ref, "k3"), forward - backward, rtol=0, atol=1e-6)

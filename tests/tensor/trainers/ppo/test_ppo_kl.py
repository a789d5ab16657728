"""KL estimates and the KL coefficient, against their formulas in NumPy."""

import json
import math

import numpy as np
import pytest
import torch

from trl_ext.trainers.ppo.objective.equations import AdaptiveKL, kl_estimate

torch.set_num_threads(1)


def log_probs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logps = -torch.rand(3, 7, generator=draw) * 5
    return logps, logps + 0.5 * torch.randn(3, 7, generator=draw)


# Estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_estimates_are_their_formulas(seed):
    logps, ref = log_probs(seed)
    x = ref.double().numpy() - logps.double().numpy()
    for estimator, expected in {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - x - 1}.items():
        np.testing.assert_allclose(kl_estimate(logps, ref, estimator), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_average_to_the_kl(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy.log() - reference.log())).sum()
    estimates = kl_estimate(policy.log()[None], reference.log()[None], estimator)[0]
    assert (policy * estimates).sum().item() == pytest.approx(exact.item(), abs=1e-6)


def test_a_reward_with_k1_ends_at_the_known_optimum_and_one_with_k3_far_beyond_it():
    """Policy gradients, without sampling noise, of score - 0.2 * estimate over completions of one token out of 20."""
    scores = torch.rand(20, generator=torch.Generator().manual_seed(0))
    reference = torch.full((20,), 1 / 20)
    optimum = (reference.log() + scores / 0.2).softmax(0)

    def trained(estimator: str) -> torch.Tensor:
        logits = torch.zeros(20)
        for _ in range(500):
            policy = logits.softmax(0)
            rewards = scores - 0.2 * kl_estimate(policy.log()[None], reference.log()[None], estimator)[0]
            logits = logits + policy * (rewards - (policy * rewards).sum())
        return logits.softmax(0)

    def kl(policy: torch.Tensor) -> float:
        return torch.xlogy(policy, policy / reference).sum().item()

    assert (trained("k1") - optimum).abs().max() < 0.01
    assert kl(optimum) < 0.65
    assert kl(trained("k3")) == pytest.approx(math.log(20), abs=1e-3)


@pytest.mark.parametrize("x", [1e-2, -1e-3, 1e-4])
def test_k3_keeps_its_digits_near_the_reference(x):
    # exp(x) - x - 1 in float32 is all rounding here.
    found = kl_estimate(torch.zeros(1, 1), torch.full((1, 1), x), "k3").item()
    assert found == pytest.approx(x**2 / 2 + x**3 / 6, rel=1e-2)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_half_precision_is_estimated_in_float32(estimator):
    logps, ref = (x.bfloat16() for x in log_probs(0))
    assert torch.equal(kl_estimate(logps, ref, estimator), kl_estimate(logps.float(), ref.float(), estimator))


# Gradients --------------------------------------------------------------------------------------------------------


@pytest.fixture
def policies():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(0)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def kl_of(p, q):
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
    expected = gradient(kl_of(logits.log_softmax(0), ref), logits)
    torch.testing.assert_close(in_reward(logits, ref, "k1"), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(in_loss(logits, ref, "k2"), expected, rtol=0, atol=1e-6)
    assert in_loss(logits, ref, "k1").abs().max() < 1e-6


def test_k3_has_the_gradients_that_its_docstring_names(policies):
    logits, ref = policies
    logps = logits.log_softmax(0)
    forward, backward = (gradient(one, logits) for one in (kl_of(logps, ref), kl_of(ref, logits.log_softmax(0))))
    torch.testing.assert_close(in_loss(logits, ref, "k3"), backward, rtol=0, atol=1e-6)
    torch.testing.assert_close(in_reward(logits, ref, "k3"), forward - backward, rtol=0, atol=1e-6)


def test_near_the_reference_k3_in_the_reward_holds_nothing_back(policies):
    _, ref = policies
    logits = (ref + 1e-2 * torch.linspace(-1, 1, 6, dtype=torch.float64)).requires_grad_()
    forward = gradient(kl_of(logits.log_softmax(0), ref), logits)
    assert in_reward(logits, ref, "k3").norm() < 1e-2 * forward.norm()


# Coefficient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2), (math.inf, 0.2), (math.nan, 0.0)],
)
def test_the_coefficient_follows_the_bounded_relative_error(kl, error):
    controller = AdaptiveKL(0.05, target=6.0, horizon=1000)
    controller.update(kl, num_episodes=64)
    assert controller.value == pytest.approx(0.05 * (1 + error * 64 / 1000), rel=1e-12)


def test_the_adaptive_coefficient_is_verls_and_openrlhfs():
    """Figures of their own `AdaptiveKLController`, at the commits of test_ppo_estimators.py."""
    controller, found = AdaptiveKL(0.2, target=6.0, horizon=1000), []
    for kl in (0.5, 3.0, 5.5, 6.5, 9.0):
        controller.update(kl, 64)
        found.append(controller.value)
    assert found == pytest.approx([0.19744, 0.194912768, 0.193873233237, 0.194907223815, 0.197402036279], abs=1e-12)


@pytest.mark.parametrize("kl", [0.0, 1e9, math.nan])
def test_a_fixed_coefficient_never_moves(kl):
    controller = AdaptiveKL(0.05)
    controller.update(kl, 10**9)
    assert controller.value == 0.05


def test_a_kl_in_a_tensor_leaves_a_plain_number():
    controller = AdaptiveKL(0.05, target=6.0)
    controller.update(torch.tensor(7.1), 64)
    assert type(controller.value) is float


def test_a_resumed_controller_goes_on_as_if_uninterrupted():
    whole, first = AdaptiveKL(0.05, target=6.0), AdaptiveKL(0.05, target=6.0)
    for controller in (whole, first):
        controller.update(torch.tensor(7.1), 64)
    resumed = AdaptiveKL(0.3, target=6.0)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (whole, resumed):
        controller.update(2.0, 64)
    assert resumed == whole


def test_a_fixed_coefficient_is_the_settings_not_the_checkpoints():
    controller = AdaptiveKL(0.2)
    controller.load_state_dict(AdaptiveKL(0.05, target=6.0).state_dict())
    assert controller.value == 0.2

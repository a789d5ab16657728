"""An adapter critic's gradient is computed before the policy's forward, and is that of one backward for both."""

import weakref

import pytest
import torch

from tests import ppo_trainers
from trl_ext.trainers.ppo import trainer as ppo_trainer
from trl_ext.trainers.ppo.critic.gradients import settled


def loss_of(weights, seen=None):
    """Of weights, of which the last has no part in it."""
    hidden = torch.tanh(weights[0] * torch.linspace(0, 1, 8))
    if seen is not None:
        seen.append(weakref.ref(hidden))
    return (hidden * weights[1]).square().sum()


def gradients(loss_from):
    weights = [torch.full((8,), 0.5 + i, requires_grad=True) for i in range(3)]
    (3 * loss_from(weights) + weights[0].sum()).backward()
    return [weight.grad for weight in weights]


def test_a_settled_loss_has_the_gradient_of_the_loss():
    plain = gradients(loss_of)
    found = gradients(lambda weights: settled(loss_of(weights), weights))
    torch.testing.assert_close(found[:2], plain[:2])
    assert plain[2] is None and found[2] is None


@pytest.mark.parametrize("is_settled", [True, False])
def test_nothing_of_its_graph_is_left(is_settled):
    seen, weights = [], [torch.full((8,), 0.5, requires_grad=True) for _ in range(2)]
    loss = loss_of(weights, seen)
    if is_settled:
        loss = settled(loss, weights)
    assert (seen[0]() is None) == is_settled
    assert loss.requires_grad and loss.item() > 0


def trained(folder, **changes):
    settings = dict(gradient_checkpointing=True, num_ppo_epochs=2, kl_coef=0.1, value_normalisation=True, max_steps=4)
    trainer = ppo_trainers.stir(ppo_trainers.trainer("adapter", folder, **settings | changes))
    trainer.train()
    return ppo_trainers.trained_weights(trainer)


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_is_that_of_one_backward_for_both_losses(packing, tmp_path, monkeypatch):
    before = ppo_trainers.trained_weights(ppo_trainers.stir(ppo_trainers.trainer("adapter", tmp_path)))
    apart = trained(tmp_path, packing=packing)
    asked = []
    monkeypatch.setattr(ppo_trainer, "can_settle", lambda trainer: asked.append(trainer))  # as ZeRO-3, FSDP and fp16
    joint = trained(tmp_path, packing=packing)
    assert asked
    assert max((weight - joint[name]).abs().max() for name, weight in apart.items()) < 1e-6
    assert max((weight - before[name]).abs().max() for name, weight in apart.items()) > 1e-3

"""On a CUDA card: scores and gradients of packed pairs in bfloat16 are no worse than twice those of padded pairs."""

import pytest
import torch

from tests import tiny
from tests.gpu.card import MARKS, ON_CARD
from tests.preferences import pairs, reward_model
from tests.reward_trainers import trainer

pytestmark = MARKS
PAIRS = pairs(16)


def scores_and_gradient(family, folder, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one batch of all pairs, on the card: [2N] scores, and the gradient of the loss."""
    model = reward_model(folder / "model", family)
    subject = trainer(folder, PAIRS, model=model, use_cpu=not ON_CARD, per_device_train_batch_size=16, **settings)
    subject.model.train()
    batch = next(iter(subject.get_train_dataloader()))
    with subject.accelerator.autocast():
        loss, outputs = subject.compute_loss(subject.model, batch, return_outputs=True)
    loss.backward()
    gradient = torch.cat([p.grad.flatten().float() for p in subject.model.parameters() if p.grad is not None])
    return outputs.logits.flatten().float().detach(), gradient


def errors(family, folder, reference, **settings) -> tuple[float, float]:
    scores, gradient = scores_and_gradient(family, folder, bf16=True, **settings)
    expected_scores, expected_gradient = reference
    error = (scores - expected_scores).square().mean().sqrt().item()
    return error, ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_bfloat16_errors_are_at_most_twice_those_of_padding(family, share_prompt, tmp_path):
    reference = scores_and_gradient(family, tmp_path, packing=False)
    padded = errors(family, tmp_path, reference, packing=False)
    packed = errors(family, tmp_path, reference, packing=True, share_prompt=share_prompt)
    assert packed[0] <= 2 * padded[0]
    assert packed[1] <= 2 * padded[1]

"""A sampler that believes in other log-probabilities (vLLM): the correction weighs the policy loss alone."""

import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.ppo_trainers import distance
from tests.rollouts import rollout
from tests.train.trainers.ppo.test_ppo_exactness import (
    CLIP,
    TOLERANCE,
    after_a_nudge,
    gradients,
    old_logps_of_reference,
    reference_forward,
    reference_loss,
    reference_targets,
    settled,
    whole_batch,
)

torch.set_num_threads(1)


def sampled(prompts, trainer):
    output, draw = rollout(prompts, trainer), random.Random(1)
    beliefs = [[-5.3 + draw.uniform(-0.6, 0.6) for _ in ids] for ids in output["completion_ids"]]
    return output | {"logprobs": beliefs}


def weights_of(mode, old_logps, beliefs):
    """Per row: the sampler's correction of each token, by hand; 1 with none."""
    found = []
    for old, belief in zip(old_logps, beliefs, strict=True):
        difference = old - torch.tensor(belief)
        if mode == "none":
            found.append(torch.ones_like(old))
        elif mode == "token_truncate":
            found.append(difference.exp().clamp(max=1.2))
        else:
            found.append(difference.sum().exp().clamp(max=1.2).expand_as(old))
    return found


@pytest.mark.parametrize(
    ("critic", "mode"),
    [
        ("head", "none"),
        ("head", "token_truncate"),
        ("head", "sequence_truncate"),
        ("separate", "token_truncate"),
        ("adapter", "sequence_truncate"),
    ],
)
def test_the_correction_weighs_the_policy_loss_alone(critic, mode, tmp_path):
    is_on = mode != "none"
    own = dict(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.2) if is_on else {}
    with patch("trl_ext.trainers.setting_checks._check_without_effect"):  # of a vLLM that is not there yet
        trainer = settled(critic, tmp_path, rollout_func=sampled, vllm_importance_sampling_correction=is_on, **own)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=1.0)
    inputs = whole_batch(trainer)
    beliefs = sampled([trainer.train_dataset[i]["prompt"] for i in range(8)], trainer)["logprobs"]
    with torch.no_grad():
        old_logps, old_values = (reference_forward(trainer, inputs, role) for role in ("policy", "value"))
        ref_logps = old_logps_of_reference(trainer, inputs)
    corrections = weights_of(mode, old_logps, beliefs)
    if is_on:
        assert max((c - 1).abs().max().item() for c in corrections) > 0.1
    advantages, returns = reference_targets(trainer._scores.tolist(), old_logps, ref_logps, old_values)

    loss, ours = after_a_nudge(trainer, inputs)
    new_logps, new_values = (reference_forward(trainer, inputs, role) for role in ("policy", "value"))
    plain = reference_loss(new_logps, old_logps, new_values, old_values, advantages, returns)
    num_tokens = sum(map(len, new_logps))
    for new, old, row, correction in zip(new_logps, old_logps, advantages, corrections, strict=True):
        ratio, a = (new - old).exp(), torch.tensor(row)
        terms = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        plain = plain + ((correction - 1) * terms).sum() / num_tokens
    plain.backward()
    assert abs(loss.item() - plain.item()) < TOLERANCE
    theirs = gradients(trainer)
    assert distance(ours, theirs) < TOLERANCE * max(1.0, max(g.abs().max().item() for g in theirs.values()))

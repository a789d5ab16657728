"""PPO steps against a plain replay: padded rows one by one, loops over tokens, no code of ours."""

import random
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests import ppo_trainers, tiny
from tests.nightly import daily, nightly
from tests.ppo_replay import TOLERANCE, Settings, check
from tests.ppo_trainers import CRITICS, distance, stir, trained_weights
from tests.rollouts import forked_rollout, rollout

GAMMA, LAM = 0.99, 0.9


WAYS = {
    "checkpointed": dict(gradient_checkpointing=True),
    "padded": dict(packing=False),
    "budget": dict(max_tokens_per_forward=24, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    "packed parts": dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
    "padded parts": dict(packing=False, per_device_train_batch_size=1, gradient_accumulation_steps=8),
}
# The critic's own course: a warm-up in which the actor stands still, its rate and its scale.
OWN = dict(critic_warmup_steps=1, value_learning_rate=3e-3)
OWN |= dict(value_normalisation=True, weight_decay=0.1, max_grad_norm=0.05)
PLAIN = {}
DAILY = [("adapter", "packed parts", OWN), ("head", "padded parts", PLAIN), ("separate", "budget", OWN)]
DAILY += [("adapter", "checkpointed", PLAIN), ("head", "checkpointed", OWN), ("separate", "checkpointed", PLAIN)]
EVERY = list(product(CRITICS, WAYS, (PLAIN, OWN)))


@pytest.mark.parametrize(
    ("critic", "way", "own"), [*DAILY, *(nightly(*one) for one in EVERY if one not in DAILY)], ids=str
)
def test_updates_are_the_plain_replays(critic, way, own, tmp_path):
    """Of two epochs, so that ratios leave 1 and values the old ones."""
    own = own | dict(gamma=GAMMA, lam=LAM, num_ppo_epochs=2)
    check(stir(ppo_trainers.trainer(critic, tmp_path, **dict(packing=True) | WAYS[way] | own)), Settings(**own))


@pytest.mark.parametrize("critic", daily(CRITICS, "adapter", "separate"))
def test_updates_on_completions_that_fork_are_the_plain_replays(critic, tmp_path):
    """Values at tokens that rows share are those of each row, and learn from all of them."""
    own = dict(gamma=GAMMA, lam=LAM, num_ppo_epochs=2, num_generations=8)
    settings = dict(packing=True, response_length=48, rollout_func=forked_rollout, max_tokens_per_forward=120)
    trainer = stir(ppo_trainers.trainer(critic, tmp_path, **settings, **own))
    check(trainer, Settings(**own))
    assert max(log.get("packing/forwarded_over_raw", 0) for log in trainer.state.log_history) < 0.6


def test_a_replay_of_other_settings_is_found_out(tmp_path):
    for own in (dict(lam=LAM), dict(cliprange=0.1)):
        trainer = stir(ppo_trainers.trainer("head", tmp_path, num_ppo_epochs=2, learning_rate=1e-2))
        with pytest.raises(AssertionError):
            check(trainer, Settings(**dict(num_ppo_epochs=2, learning_rate=1e-2) | own))


def sampled(prompts, trainer):
    output, draw = rollout(prompts, trainer), random.Random(str(prompts))
    beliefs = [[-5.3 + draw.uniform(-0.6, 0.6) for _ in ids] for ids in output["completion_ids"]]
    return output | {"logprobs": beliefs}


@pytest.mark.parametrize(
    ("critic", "mode"),
    [
        ("head", "none"),
        nightly("head", "token_truncate"),
        nightly("head", "sequence_truncate"),
        ("separate", "token_truncate"),
        ("adapter", "sequence_truncate"),
    ],
)
def test_the_correction_of_another_sampler_weighs_the_policy_loss_alone(critic, mode, tmp_path):
    """One that believes in other log-probabilities, as vLLM does."""

    def corrected(update, old_logps):
        """Per row: the correction of each token, by hand; 1 with none."""
        beliefs = sampled([row["prompt"] for row in update.rows], trainer)["logprobs"]
        found = []
        for old, belief in zip(old_logps, beliefs, strict=True):
            difference = old - torch.tensor(belief)
            difference = difference.sum().expand_as(old) if mode == "sequence_truncate" else difference
            found.append(difference.exp().clamp(max=1.2) if is_on else torch.ones_like(old))
        assert not is_on or max((one - 1).abs().max() for one in found) > 0.1
        return found

    is_on, own = mode != "none", dict(num_ppo_epochs=2, gamma=GAMMA)
    vllm = dict(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.2) if is_on else {}
    vllm |= dict(rollout_func=sampled, vllm_importance_sampling_correction=is_on)
    with patch("trl_ext.trainers.settings.values._check_without_effect"):  # of a vLLM that is not there yet
        trainer = stir(ppo_trainers.trainer(critic, tmp_path, max_steps=2, **own, **vllm))
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=1.0)
    check(trainer, Settings(**own), correct=corrected)


def trained(critic, folder, **changes):
    trainer = stir(ppo_trainers.trainer(critic, folder, **dict(max_steps=2) | changes))
    before = trained_weights(trainer)
    trainer.train()
    after = trained_weights(trainer)
    assert distance(before, after) > 1e-4
    return after


@pytest.mark.parametrize("family", daily(["qwen3", "gemma3"], "gemma3"))
def test_other_families_give_the_same_packed_and_padded(family, tmp_path):
    runs = [trained("head", tmp_path, model=tiny.model(family), packing=packing) for packing in (True, False)]
    assert distance(*runs) < TOLERANCE


# The critic's scale --------------------------------------------------------------------------------------------------


def twenty_times(completion_ids, **_):
    return [20 * score for score in ppo_trainers.reward(completion_ids)]


@pytest.mark.parametrize("critic", daily(CRITICS, "separate"))
def test_scores_twenty_times_larger_train_the_same_weights(critic, tmp_path):
    settings = dict(kl_coef=0.0, num_ppo_epochs=2, learning_rate=1e-2)
    large, small = (
        trained(critic, tmp_path, reward_funcs=scores, value_normalisation=True, **settings)
        for scores in (twenty_times, ppo_trainers.reward)
    )
    assert distance(small, large) < 10 * TOLERANCE
    unscaled = trained(critic, tmp_path, reward_funcs=twenty_times, **settings)
    assert distance(small, unscaled) > 1e-3

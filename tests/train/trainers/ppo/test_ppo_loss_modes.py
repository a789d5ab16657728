"""Every estimator with every policy loss: an update of several optimizer steps against a plain replay in torch.

The replay is `tests/ppo_replay.py`. A group ties in each update: its rows have no advantage, but
where the KL is in the loss a gradient.
"""

from dataclasses import replace

import pytest
import torch

from tests import ppo_replay, ppo_trainers
from tests.faults.starting import IS_THOROUGH
from tests.nightly import nightly
from tests.ppo_replay import OF_GROUPS
from tests.train.trainers.ppo.test_ppo_without_critic import greedy_score, tied

KL, LOW, STEPS = 0.05, 0.004, 2
ESTIMATORS = ("gae", "reinforce_pp", "rloo", "grpo", "remax")
# The settings of each policy loss; clip ranges that a small step reaches.
SEQUENCE = dict(importance_sampling_level="sequence", epsilon_high=0.006)
MODES = {
    "clip": {},
    "clip-higher": dict(epsilon_high=0.02),
    "dual clip": dict(delta=1.0041),
    "cispo": dict(loss_type="cispo", cliprange=0.2, epsilon_high=1.002),
    "vespo": dict(loss_type="vespo", cliprange=0.2),
    "sapo": dict(loss_type="sapo", cliprange=0.2),
    "mean over rows": dict(loss_type="grpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "gspo": dict(loss_type="grpo", **SEQUENCE),
    "luspo": dict(loss_type="luspo", **SEQUENCE),
}
OTHER_TERMS = ("clip-higher", "dual clip", "cispo", "vespo", "sapo", "gspo", "luspo")
PLAIN_CLIP = dict(loss_type="dapo", importance_sampling_level="token", epsilon_high=None, delta=None)
KLS = {
    "in the reward": {},
    "k2 in the loss": dict(kl_term="loss", kl_estimator="k2"),
    "k3 in the loss": dict(kl_term="loss", kl_estimator="k3"),
}
# Estimator, mode, where the KL is; tests/lanes/fuzz/test_ppo.py goes through them all.
EVERY_CASE = [
    (estimator, mode, kl)
    for mode in MODES
    for estimator in ESTIMATORS
    for kl in KLS
    if mode not in ("gspo", "luspo") or estimator in OF_GROUPS
]
# By default each loss with one estimator, a critic beside a mean that is not its own, each estimator with a KL loss.
CASES = [
    (estimator, mode, kl)
    for estimator, mode, kl in EVERY_CASE
    for i, j, k in [(list(MODES).index(mode), ESTIMATORS.index(estimator), list(KLS).index(kl))]
    if IS_THOROUGH
    or (((i + j) % 5 == 2 or (estimator, mode) == ("gae", "mean over rows")) and k == i % 3)
    or (mode == "clip" and k == 1 + j % 2)
]


def settings_of(estimator):
    """What run and replay have in common."""
    own = dict(gamma=0.99, lam=0.9) if estimator == "gae" else {}
    own |= dict(gamma=0.9) if estimator == "reinforce_pp" else {}
    own |= dict(num_generations=4) if estimator in OF_GROUPS else {}
    own |= dict(advantage_estimator=estimator, kl_coef=KL, cliprange=LOW, learning_rate=2e-3, num_ppo_epochs=STEPS)
    return own


def trainer_of(estimator, folder, **changes):
    """A trainer that makes one update of some optimizer steps on 8 rows; its reference is not the policy."""
    own = dict(rollout_func=None) if estimator == "remax" else {}
    is_bnpo = changes.get("loss_type") == "bnpo"  # a mean over a micro-batch, here the whole update
    accumulation, own["max_tokens_per_forward"] = (1, None) if is_bnpo else (2, 40)
    own |= dict(per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation)
    own |= dict(max_steps=STEPS, ref_model=ppo_trainers.actor(seed=3)) | settings_of(estimator) | changes
    return ppo_trainers.trainer("head" if estimator == "gae" else "none", folder, **own)


def check_replay(estimator, mode, kl, folder, **changes):
    """Train an update with a tied group among its rows, and once more by the replay."""
    changes = MODES[mode] | KLS[kl] | dict(reward_funcs=tied, shuffle_dataset=False) | changes
    trainer = trainer_of(estimator, folder, **changes)
    settings = ppo_replay.Settings(**settings_of(estimator) | MODES[mode] | KLS[kl])
    greedy = (lambda row: greedy_score(trainer, row, tied)) if estimator == "remax" else None
    again = ppo_replay.check(trainer, settings, greedy=greedy)
    if mode in OTHER_TERMS and estimator != "remax":  # none of ReMax's advantages is negative here
        rows = again.new, again.old, again.advantages
        terms = [torch.cat(ppo_replay.policy_terms(s, *rows)) for s in (settings, replace(settings, **PLAIN_CLIP))]
        assert (terms[0] - terms[1]).abs().max() > 1e-6
    if estimator in OF_GROUPS and kl != "in the reward":
        assert any((row == 0).all() for row in again.advantages), "no group ties"


@pytest.mark.parametrize("estimator, mode, kl", CASES)
def test_an_update_is_the_plain_replays(estimator, mode, kl, tmp_path):
    check_replay(estimator, mode, kl, tmp_path)


@pytest.mark.parametrize(
    "estimator, kl",
    [*(nightly(name, "in the reward") for name in ESTIMATORS[1:]), ("rloo", "k3 in the loss")],
)
def test_a_padded_one_is_so_too(estimator, kl, tmp_path):
    check_replay(estimator, "clip", kl, tmp_path, packing=False, max_tokens_per_forward=None)

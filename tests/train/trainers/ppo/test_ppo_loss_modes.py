"""Every estimator with every policy loss: an update of several optimizer steps against a plain replay in torch.

The replay forwards rows one by one, loops over tokens, and steps torch's own AdamW; none of its code is ours.
"""

from dataclasses import replace

import pytest
import torch

from tests import ppo_trainers
from tests.faults.starting import IS_THOROUGH
from tests.ppo_trainers import distance, trained_weights
from tests.train.trainers.ppo.test_ppo_exactness import (
    old_logps_of_reference,
    reference_forward,
    reference_targets,
)
from tests.train.trainers.ppo.test_ppo_without_critic import greedy_score, replayed
from trl_ext import PPOConfig
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

TOLERANCE = 1e-6
KL, LOW, STEPS, WIDTH = 0.05, 0.004, 2, 12
ESTIMATORS = ("gae", "reinforce_pp", "rloo", "grpo", "remax")
# The settings of each policy loss; clip ranges that a small step reaches.
SEQUENCE = dict(importance_sampling_level="sequence", epsilon_high=0.006)
MODES = {
    "clip": {},
    "clip-higher": dict(epsilon_high=0.02),
    "dual clip": dict(delta=1.005),
    "cispo": dict(loss_type="cispo", cliprange=0.2, epsilon_high=1.002),
    "vespo": dict(loss_type="vespo", cliprange=0.2),
    "sapo": dict(loss_type="sapo", cliprange=0.2),
    "mean over rows": dict(loss_type="grpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "gspo": dict(loss_type="grpo", **SEQUENCE),
    "luspo": dict(loss_type="luspo", **SEQUENCE),
    "kl in the loss": dict(loss_type="grpo", kl_term="loss", kl_estimator="k3"),
}
GROUPS = dict(advantage_estimator="rloo", num_generations=4)
OTHER_TERMS = ("clip-higher", "dual clip", "cispo", "vespo", "sapo", "gspo", "luspo")
PAIRS = [
    (estimator, mode)
    for i, mode in enumerate(MODES)
    for j, estimator in enumerate(ESTIMATORS)
    if (mode not in ("gspo", "luspo") or estimator in ("rloo", "grpo"))
    # By default each loss with one estimator, and a critic beside a mean that is not its own.
    and (IS_THOROUGH or (i + j) % 5 == 2 or (estimator, mode) == ("gae", "mean over rows"))
]


def trainer_of(estimator, folder, **changes):
    """A trainer that makes one update of some optimizer steps on 8 rows; its reference is not the policy."""
    own = dict(gamma=0.99, lam=0.9, vf_coef=0.5) if estimator == "gae" else {}
    own |= dict(gamma=0.9) if estimator == "reinforce_pp" else {}
    own |= dict(rollout_func=None) if estimator == "remax" else {}
    own |= dict(num_generations=4) if estimator in ("rloo", "grpo") else {}
    is_bnpo = changes.get("loss_type") == "bnpo"  # a mean over a micro-batch, here the whole update
    accumulation, own["max_tokens_per_forward"] = (1, None) if is_bnpo else (2, 40)
    settings = dict(
        advantage_estimator=estimator, kl_coef=KL, cliprange=LOW, max_steps=STEPS, num_ppo_epochs=STEPS,
        learning_rate=2e-3, per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
        ref_model=ppo_trainers.actor(seed=3), **own,
    )  # fmt: skip
    return ppo_trainers.trainer("head" if estimator == "gae" else "none", folder, **(settings | changes))


def trained_and_noted(trainer):
    """Train; return the weights, those from before, and the rows, rollouts and scores of the update."""
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    noted, make = [], trainer._generate_and_score_completions

    def noting(rows):
        output = make(rows)
        if trainer.model.training:
            noted.append((rows, {k: v for k, v in output.items() if k.endswith(("_ids", "_mask"))}, trainer._scores))
        return output

    trainer._generate_and_score_completions = noting
    trainer.train()
    [(rows, rollouts, scores)] = noted
    return trained_weights(trainer), before, rows, rollouts, scores


def policy_loss(mode, new, old, advantages):
    """The loss of rows that are lists of tensors [T]."""
    settings = MODES[mode]
    kind, high = settings.get("loss_type", "dapo"), settings.get("epsilon_high", LOW)
    rows = []
    for n, o, a in zip(new, old, advantages, strict=True):
        log_ratio = n - o
        ratio = (log_ratio.mean() if "importance_sampling_level" in settings else log_ratio).exp()
        if kind == "cispo":
            rows.append(-ratio.clamp(max=high).detach() * a * n)
        elif kind == "sapo":
            tau = torch.where(a > 0, 1.0, 1.05)
            rows.append(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * a)
        elif kind == "vespo":
            log_w = log_ratio.sum()
            k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
            rows.append(-(lam + k * log_w - lam * log_w.exp()).exp().detach() * a * n)
        else:
            clipped = torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + high) * a)
            if "delta" in settings:  # arXiv:1912.09729, equation 5
                clipped = torch.where(a < 0, torch.maximum(clipped, settings["delta"] * a), clipped)
            rows.append(-clipped)
    sums = torch.stack([row.sum() for row in rows])
    lengths = torch.tensor([float(len(row)) for row in rows])
    if kind in ("grpo", "sapo"):
        return (sums / lengths).mean()
    return sums.sum() / {"dr_grpo": len(rows) * WIDTH, "luspo": len(rows)}.get(kind, lengths.sum())


def value_loss(new, old, returns):
    clipped = [o + (n - o).clamp(-0.2, 0.2) for n, o in zip(new, old, strict=True)]
    errors = [torch.maximum((n - r) ** 2, (c - r) ** 2) for n, c, r in zip(new, clipped, returns, strict=True)]
    return 0.5 * torch.cat(errors).mean()


@pytest.mark.parametrize("estimator, mode", PAIRS)
def test_an_update_is_the_plain_replays(estimator, mode, tmp_path):
    trainer = trainer_of(estimator, tmp_path, **MODES[mode])
    ours, before, rows, rollouts, scores = trained_and_noted(trainer)
    trainer.model.load_state_dict(before)
    in_loss = MODES[mode].get("kl_term") == "loss"
    with torch.no_grad():
        old = reference_forward(trainer, rollouts, "policy")
        ref = old_logps_of_reference(trainer, rollouts)
        if estimator == "gae":
            old_values = reference_forward(trainer, rollouts, "value")
            advantages, returns = reference_targets(scores.tolist(), old, old if in_loss else ref, old_values)
            returns = [torch.tensor(row) for row in returns]
        else:
            rewards = []
            for score, new, other in zip(scores.tolist(), old, ref, strict=True):
                row = [0.0 if in_loss else -KL * (n - r) for n, r in zip(new.tolist(), other.tolist(), strict=True)]
                rewards.append([*row[:-1], row[-1] + score])
            greedy = [greedy_score(trainer, row) if estimator == "remax" else 0.0 for row in rows]
            advantages = replayed(estimator, rewards, greedy, trainer.num_generations)
    advantages = [torch.tensor(row) for row in advantages]
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(weights, lr=2e-3, eps=1e-3, weight_decay=0.0)
    for _ in range(STEPS):
        new = reference_forward(trainer, rollouts, "policy")
        loss = policy_loss(mode, new, old, advantages)
        if estimator == "gae":
            loss = loss + 0.5 * value_loss(reference_forward(trainer, rollouts, "value"), old_values, returns)
        if in_loss:
            loss = loss + KL * torch.cat([(r - n).exp() - (r - n) - 1 for n, r in zip(new, ref, strict=True)]).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
    if mode in OTHER_TERMS and estimator != "remax":  # none of ReMax's advantages is negative here
        moved = [row.detach() for row in new]
        assert (policy_loss(mode, moved, old, advantages) - policy_loss("clip", moved, old, advantages)).abs() > 1e-6
    assert distance(ours, trained_weights(trainer)) < TOLERANCE


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(importance_sampling_level="sequence"), "one advantage a token"),
        (dict(importance_sampling_level="sequence", advantage_estimator="remax"), "one advantage a token"),
        (dict(loss_type="luspo"), "a loss of whole completions"),
        (
            dict(GROUPS, loss_type="vespo", importance_sampling_level="sequence"),
            "has no effect with loss_type='vespo'",
        ),
        (dict(loss_type="cispo"), "0.2 would cut every one"),
        (dict(delta=1.2), "delta=1.2 is not above 1 \\+ epsilon_high = 1.2"),
        (dict(delta=1.25, epsilon_high=0.3), "delta=1.25 is not above"),
        (dict(loss_type="cispo", epsilon_high=5.0, cliprange=0.1), "cliprange=0.1 has no effect without a loss that"),
        (dict(loss_type="sapo", delta=3.0), "delta=3.0 has no effect without a loss that clips"),
        (dict(loss_type="vespo", epsilon_high=0.3), "epsilon_high=0.3 has no effect without"),
        (dict(sapo_temperature_pos=2.0), "has no effect without loss_type='sapo'"),
        (dict(loss_type="sapo", vespo_k_pos=1.0), "has no effect without loss_type='vespo'"),
    ],
)
def test_a_loss_that_means_nothing_is_refused_with_its_reason(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PPOConfig("out", use_cpu=True, bf16=False, per_device_train_batch_size=4, **settings)


@pytest.mark.parametrize("mode", ["cispo", "sapo"])
def test_a_copied_config_is_accepted(mode):
    first = PPOConfig("out", use_cpu=True, bf16=False, per_device_train_batch_size=4, **MODES[mode])
    copy = replace(first, generation_batch_size=None, steps_per_generation=None)
    assert (copy.loss_type, copy.epsilon_high) == (first.loss_type, first.epsilon_high)

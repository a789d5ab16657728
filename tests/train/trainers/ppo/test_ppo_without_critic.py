"""Estimators without a critic: against a plain replay in torch, learning, resuming, and what is refused."""

import math

import pytest
import torch
from transformers.utils import logging

from tests import ppo_trainers
from tests.ppo_trainers import distance, resumed_as_whole
from tests.train.trainers.ppo.test_ppo_exactness import (
    after_a_nudge,
    gradients,
    old_logps_of_reference,
    reference_forward,
)
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

WITHOUT_CRITIC = ("reinforce_pp", "rloo", "grpo", "remax")
KL, CLIP, GAMMA = 0.05, 0.2, 0.9


def trainer_of(estimator, folder, **changes):
    changes = dict(num_generations=1 if estimator in ("reinforce_pp", "remax") else 4) | changes
    if estimator == "remax":
        changes |= dict(rollout_func=None)
    return ppo_trainers.trainer("none", folder, advantage_estimator=estimator, **changes)


def sampled(trainer, num=8):
    trainer.model.train()
    copies = trainer.num_generations
    rows = [trainer.train_dataset[i // copies] for i in range(num)]
    inputs = trainer._generate_and_score_completions(rows)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    return rows, inputs


def replayed(estimator, rewards, baselines, size):
    """Advantages per row as lists, by loops over rows and tokens."""
    if estimator in ("reinforce_pp", "remax"):
        gamma = GAMMA if estimator == "reinforce_pp" else 1.0
        found = []
        for row, baseline in zip(rewards, baselines, strict=True):
            running, out = 0.0, []
            for reward in reversed(row):
                running = reward + gamma * running
                out.insert(0, running - baseline)
            found.append(out)
        if estimator == "remax":
            return found
        flat = [a for row in found for a in row]
        mean = sum(flat) / len(flat)
        std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1) + 1e-8)
        return [[(a - mean) / std for a in row] for row in found]
    totals, found = [sum(row) for row in rewards], []
    for i, total in enumerate(totals):
        group = totals[i // size * size : (i // size + 1) * size]
        mean = sum(group) / size
        if estimator == "rloo":
            advantage = total - (sum(group) - total) / (size - 1)
        else:
            advantage = (total - mean) / (math.sqrt(sum((t - mean) ** 2 for t in group) / (size - 1)) + 1e-6)
        found.append([advantage] * len(rewards[i]))
    return found


def greedy_score(trainer, row, reward=ppo_trainers.reward):
    """The score of a prompt's greedy completion, token by token through transformers' own forward."""
    ids = trainer._tokenizer(row["prompt"])["input_ids"]
    start = len(ids)
    while len(ids) - start < trainer.args.max_completion_length:
        logits = type(trainer.model).forward(trainer.model, input_ids=torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(logits.argmax())]
        if ids[-1] in trainer.eos_token_ids:
            break
    return reward(prompts=[row["prompt"]], completion_ids=[ids[start:]])[0]


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC)
def test_advantages_loss_and_gradients_are_a_plain_replays(estimator, tmp_path):
    """Padded; packed, `test_ppo_loss_modes.py` replays the weights."""
    own = dict(gamma=GAMMA) if estimator == "reinforce_pp" else {}
    trainer = trainer_of(
        estimator, tmp_path, kl_coef=KL, per_device_train_batch_size=8, gradient_accumulation_steps=1,
        num_ppo_epochs=2, packing=False, **own,
    )  # fmt: skip
    rows, inputs = sampled(trainer)
    counted = inputs["completion_mask"].bool()
    with torch.no_grad():
        old_logps = reference_forward(trainer, inputs, "policy")
        ref_logps = old_logps_of_reference(trainer, inputs)
        baselines = [greedy_score(trainer, row) if estimator == "remax" else 0.0 for row in rows]
    rewards = []
    for score, new, ref in zip(trainer._scores.tolist(), old_logps, ref_logps, strict=True):
        row = [-KL * (n - r) for n, r in zip(new.tolist(), ref.tolist(), strict=True)]
        row[-1] += score
        rewards.append(row)
    advantages = replayed(estimator, rewards, baselines, trainer.num_generations)
    assert any(abs(a) > 0.01 for row in advantages for a in row)
    for mine, mask, row in zip(inputs["advantages"], counted, advantages, strict=True):
        torch.testing.assert_close(mine[mask], torch.tensor(row), rtol=0, atol=1e-5)
    assert "values" not in inputs and "returns" not in inputs

    loss, ours = after_a_nudge(trainer, inputs, our_loss_of_policy)
    expected = torch.zeros(())
    new_logps = reference_forward(trainer, inputs, "policy")
    for new, old, row in zip(new_logps, old_logps, advantages, strict=True):
        ratio, a = (new - old).exp(), torch.tensor(row)
        expected = expected - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).sum()
    expected = expected / sum(map(len, new_logps))
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-5
    theirs = gradients(trainer)
    assert distance(ours, theirs) < 1e-5 * max(1.0, max(g.abs().max().item() for g in theirs.values()))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_kl_as_a_loss_adds_its_gradient(packing, estimator, tmp_path):
    """The difference that kl_coef makes to the gradient, against the estimate's own over the tokens, by autograd."""
    found = {}
    for coefficient in (KL, 2 * KL):
        trainer = trainer_of(
            "rloo", tmp_path, kl_coef=coefficient, kl_term="loss", kl_estimator=estimator, packing=packing,
            per_device_train_batch_size=8, gradient_accumulation_steps=1,
        )  # fmt: skip
        _, inputs = sampled(trainer)
        _, found[coefficient] = after_a_nudge(trainer, inputs, our_loss_of_policy)
    new = reference_forward(trainer, inputs, "policy")
    with torch.no_grad():
        ref = old_logps_of_reference(trainer, inputs)
    terms = [
        (r - n).exp() - (r - n) - 1 if estimator == "k3" else (n - r) ** 2 / 2 for n, r in zip(new, ref, strict=True)
    ]
    (KL * torch.cat(terms).mean()).backward()
    difference = {name: found[2 * KL][name] - found[KL][name] for name in found[KL]}
    assert max(grad.abs().max() for grad in difference.values()) > 1e-5
    assert distance(difference, gradients(trainer)) < 1e-6


def all_equal(completion_ids, **_):
    return [1.0] * len(completion_ids)


@pytest.mark.parametrize("estimator", ["reinforce_pp", "rloo", "grpo"])
def test_rewards_that_are_all_equal_leave_the_kl_in_the_loss(estimator, tmp_path, caplog):
    logging.enable_propagation()
    trainer = trainer_of(
        estimator, tmp_path, kl_coef=0.5, kl_term="loss", kl_estimator="k2", ref_model=ppo_trainers.actor(seed=3),
        reward_funcs=all_equal,
    )  # fmt: skip
    before = ppo_trainers.trained_weights(trainer)
    trainer.train()
    assert distance(before, ppo_trainers.trained_weights(trainer)) > 1e-5
    assert all(log["loss/kl_avg"] > 0 for log in trainer.state.log_history if "loss" in log)
    assert not any("packing/skipped_rows_frac" in log for log in trainer.state.log_history)
    assert "no gradient" not in caplog.text


def half_equal(prompts, completion_ids, **_):
    """Rewards without variance for the groups of long prompts."""
    own = ppo_trainers.reward(completion_ids)
    return [1.0 if len(prompt.split()) > 5 else score for prompt, score in zip(prompts, own, strict=True)]


def test_rows_of_zero_advantage_are_left_out_where_that_changes_nothing(tmp_path):
    settings = dict(kl_coef=0.0, reward_funcs=half_equal, shuffle_dataset=False)
    runs = [trainer_of("rloo", tmp_path, skip_zero_advantage=skips, **settings) for skips in (None, True, False)]
    shares = []
    for trainer in runs:
        trainer.train()
        shares.append([log.get("packing/skipped_rows_frac") for log in trainer.state.log_history if "loss" in log])
    assert max(shares[0]) > 0 and shares[0] == shares[1] and set(shares[2]) == {None}
    weights = [ppo_trainers.trained_weights(trainer) for trainer in runs]
    assert distance(weights[0], weights[1]) < 1e-6 and distance(weights[0], weights[2]) < 1e-6


def test_leaving_them_out_is_refused_where_each_has_a_kl(tmp_path):
    with pytest.raises(ConfigError, match=r"would change the gradient: beta=0\.05 adds a KL penalty to every row"):
        trainer_of("rloo", tmp_path, skip_zero_advantage=True, kl_term="loss", kl_estimator="k2")


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_is_said_to_have_no_gradient_only_where_it_has_none(packing, tmp_path, caplog):
    """Rows of one group of each step tie; with bnpo, micro-batches are planned one by one."""
    logging.enable_propagation()
    settings = dict(kl_coef=0.0, reward_funcs=half_equal, shuffle_dataset=False, loss_type="bnpo", packing=packing)
    settings |= dict(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    trainer_of("rloo", tmp_path, **settings).train()
    assert "no gradient" not in caplog.text
    trainer_of("rloo", tmp_path, **settings | dict(reward_funcs=all_equal)).train()
    assert caplog.text.count("The step has no gradient") == 1


def test_a_greedy_completion_that_nothing_scores_leaves_its_row_out(tmp_path):
    """The reward does not know which completion is greedy; it scores one prompt's alone while training."""
    trainer = trainer_of("remax", tmp_path, max_steps=1, reward_funcs=lambda completion_ids, **_: (
        ppo_trainers.reward(completion_ids)
        if trainer.model.training
        else [None, *ppo_trainers.reward(completion_ids[1:])]
    ))  # fmt: skip
    trainer.train()
    assert all(weight.isfinite().all() for weight in ppo_trainers.trained_weights(trainer).values())
    assert 0 < trainer.state.log_history[0]["ppo/unscored_frac"] < 1


def our_loss_of_policy(trainer, inputs):
    loss = trainer.compute_loss(trainer.model, [trainer._update.as_one(inputs)])
    loss.backward()
    return loss


@pytest.mark.parametrize("estimator", ["reinforce_pp", "remax", "rloo"])
def test_a_resumed_run_is_the_run_that_did_not_stop(estimator, tmp_path):
    settings = dict(
        max_steps=6, num_ppo_epochs=2, gradient_accumulation_steps=1, rollout_func=None, kl_coef=0.1,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    resumed_as_whole(lambda out: trainer_of(estimator, out, **settings), tmp_path, 3)


def test_greedy_completions_leave_no_trace_in_the_log(tmp_path):
    trainer = trainer_of("remax", tmp_path, max_steps=2, log_completions=False)
    trainer.train()
    assert not any(key.startswith("eval") for log in trainer.state.log_history for key in log)
    assert len(trainer._logs["completion"]) == len(trainer._logs["advantages"])

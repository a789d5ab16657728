"""Estimators without a critic, which test_ppo_loss_modes replays: what has no gradient, resuming, what is refused."""

import pytest
import torch
from transformers.utils import logging

from tests import ppo_trainers
from tests.nightly import nightly
from tests.ppo_trainers import distance, resumed_as_whole, trained_weights


def trainer_of(estimator, folder, **changes):
    changes = dict(num_generations=1 if estimator in ("reinforce_pp", "remax") else 4) | changes
    if estimator == "remax":
        changes |= dict(rollout_func=None)
    return ppo_trainers.trainer("none", folder, advantage_estimator=estimator, **changes)


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


def tied(prompts, completion_ids, **_):
    """A fixed function of the completion, and 1 in the groups of long prompts."""
    own = ppo_trainers.reward(completion_ids)
    return [1.0 if len(prompt.split()) > 5 else score for prompt, score in zip(prompts, own, strict=True)]


def all_equal(completion_ids, **_):
    return [1.0] * len(completion_ids)


@pytest.mark.parametrize("estimator", ["reinforce_pp", "rloo", nightly("grpo")])
def test_rewards_that_are_all_equal_leave_the_kl_in_the_loss(estimator, tmp_path, caplog):
    logging.enable_propagation()
    settings = dict(kl_coef=0.5, kl_term="loss", kl_estimator="k2", reward_funcs=all_equal)
    trainer = trainer_of(estimator, tmp_path, ref_model=ppo_trainers.actor(seed=3), **settings)
    before = trained_weights(trainer)
    trainer.train()
    assert distance(before, trained_weights(trainer)) > 1e-5
    assert all(log["loss/kl_avg"] > 0 for log in trainer.state.log_history if "loss" in log)
    assert not any("packing/skipped_rows_frac" in log for log in trainer.state.log_history)
    assert "no gradient" not in caplog.text


def test_rows_of_zero_advantage_are_left_out_where_that_changes_nothing(tmp_path):
    settings = dict(kl_coef=0.0, reward_funcs=tied, shuffle_dataset=False)
    runs = [trainer_of("rloo", tmp_path, skip_zero_advantage=skips, **settings) for skips in (None, True, False)]
    shares = []
    for trainer in runs:
        trainer.train()
        shares.append([log.get("packing/skipped_rows_frac") for log in trainer.state.log_history if "loss" in log])
    assert max(shares[0]) > 0 and shares[0] == shares[1] and set(shares[2]) == {None}
    weights = [trained_weights(trainer) for trainer in runs]
    assert distance(weights[0], weights[1]) < 1e-6 and distance(weights[0], weights[2]) < 1e-6


def test_a_greedy_completion_that_nothing_scores_leaves_its_row_out(tmp_path):
    """The reward does not know which completion is greedy; it scores one prompt's alone while training."""

    def some(completion_ids, **_):
        scores = ppo_trainers.reward(completion_ids)
        return scores if trainer.model.training else [None, *scores[1:]]

    trainer = trainer_of("remax", tmp_path, max_steps=1, reward_funcs=some)
    trainer.train()
    assert all(weight.isfinite().all() for weight in trained_weights(trainer).values())
    assert 0 < trainer.state.log_history[0]["ppo/unscored_frac"] < 1
    # Greedy completions leave no trace in the log.
    assert not any(key.startswith("eval") for log in trainer.state.log_history for key in log)
    assert len(trainer._logs["completion"]) == len(trainer._logs["advantages"])


@pytest.mark.parametrize("estimator", ["reinforce_pp", "remax", nightly("rloo")])
def test_a_resumed_run_is_the_run_that_did_not_stop(estimator, tmp_path):
    settings = dict(max_steps=6, num_ppo_epochs=2, gradient_accumulation_steps=1, rollout_func=None)
    settings |= dict(save_strategy="steps", save_steps=1, kl_coef=0.1)
    resumed_as_whole(lambda out: trainer_of(estimator, out, **settings), tmp_path, 3)

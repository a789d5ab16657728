"""An evaluation of PPO: what it tells of critic, scores and completions, and that training goes on as without it."""

import pytest

from tests import ppo_trainers
from tests.nightly import daily
from tests.ppo_trainers import CRITICS, completed, distance, stir, trained_weights
from tests.rollouts import rollout
from trl_ext import RuleSet
from trl_ext.rewards import Length

NUM_PROMPTS = 8
OF_THE_CRITIC = ("loss/value_avg", "ppo/explained_variance", "ppo/value_mean", "ppo/return_mean")
OF_THE_SCORE = ("objective/scores", "objective/kl", "completions/mean_length")
OF_THE_SCORE += ("rewards/length/mean", "rewards/reward_model_0/mean")
# Completions and scores that are functions of the prompt.
FIXED = dict(rollout_func=rollout, reward_funcs=ppo_trainers.reward, score_normalisation="none")
FIXED |= dict(reward_model=None, reward_processing_classes=None)


def evaluating(critic, folder, **changes):
    """A trainer that samples, with a rule, a reward model, and held-out prompts."""
    settings = dict(eval_dataset=ppo_trainers.prompts(NUM_PROMPTS), per_device_eval_batch_size=4, max_steps=2)
    settings |= dict(reward_funcs=RuleSet([Length(high=4, slack=20)], normalise=True), **ppo_trainers.scorer())
    settings |= dict(score_normalisation="running", rollout_func=None, stop_token_id=7, num_completions_to_print=0)
    settings |= dict(kl_coef=0.1, model=ppo_trainers.decided_actor())
    settings |= dict(advantage_estimator="reinforce_pp") if critic == "none" else dict(value_normalisation=True)
    return ppo_trainers.trainer(critic, folder, **settings | changes)


@pytest.mark.parametrize("critic", daily([*CRITICS, "none"], "adapter"))
def test_training_goes_on_as_without_evaluations(critic, tmp_path):
    often = dict(eval_strategy="steps", eval_steps=1, log_completions=True, eval_dataset=ppo_trainers.prompts(4))
    plain, tried = evaluating(critic, tmp_path / "plain"), evaluating(critic, tmp_path / "tried", **often)
    for trainer in (plain, tried):
        stir(trainer).train()
    assert distance(trained_weights(plain), trained_weights(tried)) == 0
    assert plain._scoring.state_dict() == tried._scoring.state_dict()
    assert plain._scale.state_dict() == tried._scale.state_dict()
    assert plain._kl.state_dict() == tried._kl.state_dict()

    logs = [log for log in tried.state.log_history if "eval_loss" in log]
    assert [log["step"] for log in logs] == [1, 2]
    told = OF_THE_SCORE + (() if critic == "none" else OF_THE_CRITIC)
    assert all({f"eval_{name}" for name in told} <= log.keys() for log in logs)
    assert critic != "none" or not any("explained_variance" in key for log in logs for key in log)
    again = tried.evaluate()
    assert all(again[key] == logs[-1][key] for key in again if "completions/" in key)


@pytest.mark.parametrize(("critic", "packing"), [("adapter", True), ("head", False), ("separate", True)])
def test_the_error_of_the_critic_is_that_of_a_training_batch(critic, packing, tmp_path):
    """The rollouts of a training batch, whose values and returns `test_ppo_exactness.py` compares with plain torch."""
    data = ppo_trainers.prompts(NUM_PROMPTS)
    settings = dict(eval_dataset=data, packing=packing, per_device_eval_batch_size=8, **FIXED)
    trainer = stir(evaluating(critic, tmp_path, **settings))
    found = trainer.evaluate()
    trainer.model.train()
    batch = completed(trainer, list(data))
    counted = batch["completion_mask"].bool()
    values, returns = (batch[name][counted].double() for name in ("values", "returns"))
    left = returns - values
    scale = trainer._metrics["train"]["ppo/value_scale_std"][-1]
    assert scale != 1
    assert found["eval_loss/value_avg"] == pytest.approx(0.5 * left.square().mean().item() / scale**2, rel=1e-6)
    explained = 1 - left.var() / returns.var()
    assert found["eval_ppo/explained_variance"] == pytest.approx(explained.item(), abs=1e-6)

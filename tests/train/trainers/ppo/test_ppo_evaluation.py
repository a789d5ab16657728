"""An evaluation of PPO: what it tells of critic, scores and completions, and that training goes on as without it."""

import json

import pytest
from transformers import TrainerCallback

from tests import ppo_trainers
from tests.nightly import daily
from tests.ppo_trainers import CRITICS, distance, stir, trained_weights
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


class Shows(TrainerCallback):
    """Lets a trainer show completions after every step."""

    trainer = None

    def on_step_end(self, *args, **kwargs):
        self.trainer.generate_completions(sampling=True)


@pytest.mark.parametrize("critic", daily([*CRITICS, "none"], "adapter"))
def test_training_goes_on_as_without_evaluations(critic, tmp_path):
    often = dict(eval_strategy="steps", eval_steps=1, eval_greedy=True, eval_dataset=ppo_trainers.prompts(4))
    plain, shows = evaluating(critic, tmp_path / "plain"), Shows()
    tried = shows.trainer = evaluating(critic, tmp_path / "tried", callbacks=[shows], **often)
    for trainer in (plain, tried):
        stir(trainer).train()
    assert distance(trained_weights(plain), trained_weights(tried)) == 0
    assert plain._scoring.state_dict() == tried._scoring.state_dict()
    assert plain._scale.state_dict() == tried._scale.state_dict()
    assert plain._kl.state_dict() == tried._kl.state_dict()

    logs = [log for log in tried.state.log_history if "eval_loss" in log]
    assert [log["step"] for log in logs] == [1, 2]
    told = OF_THE_SCORE + (() if critic == "none" else OF_THE_CRITIC)
    told = {f"{prefix}_{name}" for name in told for prefix in ("eval", "eval_greedy")}
    assert all(told <= log.keys() for log in logs)
    assert critic != "none" or not any("explained_variance" in key for log in logs for key in log)
    # What was shown, and greedy completions, are in no other number.
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
    batch = trainer._generate_and_score_completions(list(data))
    counted = batch["completion_mask"].bool()
    values, returns = (batch[name][counted].double() for name in ("values", "returns"))
    left = returns - values
    scale = trainer._metrics["train"]["ppo/value_scale_std"][-1]
    assert scale != 1
    assert found["eval_loss/value_avg"] == pytest.approx(0.5 * left.square().mean().item() / scale**2, rel=1e-6)
    explained = 1 - left.var() / returns.var()
    assert found["eval_ppo/explained_variance"] == pytest.approx(explained.item(), abs=1e-6)


def test_the_size_of_evaluation_batches_makes_no_difference(tmp_path):
    """A mean of batches' explained variances would depend on it."""
    found = {}
    for size in (1, 8):
        settings = dict(per_device_eval_batch_size=size, value_normalisation=False, **FIXED)
        trainer = evaluating("head", tmp_path, **settings)
        found[size] = stir(trainer).evaluate()
    for name in ("loss/value_avg", "ppo/explained_variance", "objective/scores", "objective/kl"):
        assert found[1][f"eval_{name}"] == pytest.approx(found[8][f"eval_{name}"], abs=1e-6)


def test_nothing_is_generated_twice_unless_it_is_asked_for(tmp_path, monkeypatch):
    for is_greedy in (False, True):
        trainer = evaluating("head", tmp_path, eval_greedy=is_greedy, num_generations_eval=2)
        sampled, generate = [], trainer._generate

        def counting(prompts, generate=generate, trainer=trainer, sampled=sampled):
            sampled.append((trainer.args.eval_temperature, len(prompts)))
            return generate(prompts)

        monkeypatch.setattr(trainer, "_generate", counting)
        trainer.evaluate()
        # Two batches of two prompts; a prompt's two completions would be the same one.
        batches = [(0.0, 2), (None, 4)] if is_greedy else [(None, 4)]
        assert sampled == batches * 4


def test_completions_are_written_with_their_scores(tmp_path, capsys):
    trainer = evaluating("head", tmp_path, log_completions=True, missing_eos_penalty=0.5)
    trainer.evaluate(metric_key_prefix="eval_easy")
    rows = [json.loads(line) for line in (tmp_path / "completions" / "held_out_00000_easy.jsonl").open()]
    assert sorted(row["prompt"] for row in rows) == sorted(trainer.eval_dataset["prompt"])
    assert {row["decoding"] for row in rows} == {"sampled"}
    capsys.readouterr()
    trainer.generate_completions()
    shown = capsys.readouterr().out
    assert "greedy" in shown and "sampled" in shown and "score" in shown
    rows = [json.loads(line) for line in (tmp_path / "completions" / "held_out_00000.jsonl").open()]
    assert [row["decoding"] for row in rows] == (["sampled"] * 4 + ["greedy"] * 4) * 2
    mean = trainer.evaluate()["eval_objective/scores"]
    scores = [row["score"] for row in rows if row["decoding"] == "sampled"]
    assert sum(scores) / NUM_PROMPTS == pytest.approx(mean, abs=1e-6)
    assert all("length" in json.loads(row["rule_trace"]) for row in rows)


def test_several_held_out_sets_are_shown_in_one_table(tmp_path):
    sets = {"easy": ppo_trainers.prompts(4), "hard": ppo_trainers.prompts(8).select(range(4, 8))}
    trainer = evaluating("head", tmp_path, eval_dataset=sets, log_completions=True)
    trainer.generate_completions()
    rows = [json.loads(line) for line in (tmp_path / "completions" / "held_out_00000.jsonl").open()]
    assert {row["prompt"] for row in rows} == {prompt for one in sets.values() for prompt in one["prompt"]}
    trainer.evaluate()
    for name, one in sets.items():
        rows = [json.loads(line) for line in (tmp_path / "completions" / f"held_out_00000_{name}.jsonl").open()]
        assert sorted(row["prompt"] for row in rows) == sorted(one["prompt"])


def test_the_best_checkpoint_may_be_that_of_greedy_completions(tmp_path):
    name = "greedy_objective/scores"
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="best", metric_for_best_model=name)
    trainer = evaluating("head", tmp_path, eval_greedy=True, max_steps=1, **settings)
    trainer.train()
    evaluated = next(log for log in trainer.state.log_history if "eval_loss" in log)
    assert trainer.state.best_metric == evaluated[f"eval_{name}"] != evaluated["eval_objective/scores"]

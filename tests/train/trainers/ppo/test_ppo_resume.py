"""A PPO run that stops at any optimizer step and resumes is the run that did not stop, bit for bit."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests import grpo_trainers, ppo_trainers, tiny
from tests.faults.starting import IS_THOROUGH
from tests.ppo_trainers import CRITICS, distance, resumed_as_whole, stir, trained_weights
from trl_ext.errors import ConfigError

# Sampled completions, two epochs of two mini-batches an update: four steps an update, and 16 prompts are two of them,
# so that 10 steps reach the second epoch over the data.
RUN = dict(max_steps=10, num_ppo_epochs=2, num_mini_batches=2, gradient_accumulation_steps=1, rollout_func=None)
RUN |= dict(save_strategy="steps", save_steps=1, kl_coef=0.1, kl_target=0.5, kl_horizon=100)
RUN |= dict(score_normalisation="running", score_clip=2.0, value_normalisation=True, reward_funcs=ppo_trainers.reward)
# Within an epoch, between two, between two updates, and the same in the second epoch over the data.
STOPS = {"adapter": (1, 8), "head": (3, 7), "separate": (4, 9)}  # by day the last of each


def run(critic, folder, resume_from=None):
    trainer = ppo_trainers.trainer(critic, folder, **RUN, **ppo_trainers.scorer())
    if resume_from is None:
        stir(trainer)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer


def losses(trainer):
    keys = ("loss", "loss/value_avg", "objective/scores", "objective/kl", "ppo/kl_coef")
    return {log["step"]: [log.get(key) for key in keys] for log in trainer.state.log_history if "loss" in log}


@pytest.fixture(scope="module", params=CRITICS)
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, run(request.param, folder)


def test_the_resumed_run_is_the_uninterrupted_one(uninterrupted, tmp_path):
    critic, folder, whole = uninterrupted
    for step in sum(STOPS.values(), ()) if IS_THOROUGH else STOPS[critic][1:]:
        resumed = run(critic, tmp_path / str(step), folder / f"checkpoint-{step}")
        expected = {s: values for s, values in losses(whole).items() if s > step}
        assert {s: v for s, v in losses(resumed).items() if s > step} == expected, step
        assert distance(trained_weights(resumed), trained_weights(whole)) == 0, step


def test_the_kl_coefficient_and_the_moments_move_and_are_saved(uninterrupted):
    _, folder, _whole = uninterrupted
    states = [json.loads((folder / f"checkpoint-{step}" / "ppo.json").read_text()) for step in (1, 9)]
    assert states[0]["kl"] != states[1]["kl"]
    assert states[0]["scores"][0]["moments"][0] < states[1]["scores"][0]["moments"][0]


def test_a_grpo_run_resumes_in_the_middle_of_its_rollouts(tmp_path):
    settings = dict(save_strategy="steps", save_steps=1, max_steps=5, num_iterations=2, rollout_func=None)
    settings |= dict(per_device_train_batch_size=8, max_completion_length=6, data=ppo_trainers.prompts(4))
    resumed_as_whole(lambda folder: grpo_trainers.trainer(folder, **settings), tmp_path, 3)


# Loading -------------------------------------------------------------------------------------------------------------


def values_by_plain_transformers(critic, folder, ids):
    """The critic's value after each token, by transformers and PEFT alone."""
    if critic == "separate":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "critic")
        hidden = model.model(input_ids=ids).last_hidden_state
        return model.score(hidden)[..., 0]
    if critic == "head":
        from safetensors.torch import load_file

        model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
        model.score.load_state_dict(load_file(folder / "critic" / "score.safetensors"))
        return model.eval()(input_ids=ids).logits[..., 0]
    tiny.model("llama").save_pretrained(folder / "base")
    base = AutoModelForTokenClassification.from_pretrained(folder / "base", num_labels=1)
    return PeftModel.from_pretrained(base, folder / "critic").eval()(input_ids=ids).logits[..., 0]


def test_actor_and_critic_load_in_plain_transformers_and_peft(uninterrupted):
    critic, folder, trainer = uninterrupted
    trainer.save_model(str(folder / "final"))
    ids = torch.tensor([[5, 9, 44, 7, 3]])
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer._critic.model(trainer.model).eval()(input_ids=ids, role="critic", use_cache=False)
        if critic == "head":
            expected = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
        actual = values_by_plain_transformers(critic, folder / "final", ids)
        torch.testing.assert_close(actual, expected.token_values, rtol=0, atol=1e-6)
        saved = json.loads((folder / "final" / "critic" / "critic.json").read_text())
        meant = trainer._scale.values(trainer._scale.standardised(actual))
        torch.testing.assert_close(saved["intercept"] + saved["slope"] * actual, meant, rtol=1e-6, atol=1e-6)
        assert saved["slope"] != 1
        logits = trainer.model(input_ids=ids).logits
        if critic == "adapter":
            actor = PeftModel.from_pretrained(tiny.model("llama"), folder / "final").eval()
        else:
            actor, report = AutoModelForCausalLM.from_pretrained(folder / "final", output_loading_info=True)
            assert not report["unexpected_keys"] and not report["missing_keys"]
        torch.testing.assert_close(actor(input_ids=ids).logits, logits, rtol=0, atol=1e-6)


def test_the_best_model_has_its_values_on_their_scale(tmp_path):
    settings = RUN | dict(max_steps=4, num_ppo_epochs=1, num_mini_batches=1, learning_rate=1e-2)
    settings |= dict(load_best_model_at_end=True, greater_is_better=False)
    settings |= dict(eval_strategy="steps", eval_steps=1, eval_dataset=ppo_trainers.prompts(4))
    settings |= dict(metric_for_best_model="objective/kl", per_device_eval_batch_size=4)
    trainer = ppo_trainers.trainer("head", tmp_path / "run", **settings, **ppo_trainers.scorer())
    trainer.train()
    best, last = (tmp_path / "run" / f"checkpoint-{step}" for step in (trainer.state.best_global_step, 4))
    values = [json.loads((folder / "ppo.json").read_text())["values"] for folder in (best, last)]
    assert trainer._scale.state_dict() == values[0] != values[1]
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final/critic/critic.json").read_text() == (best / "critic/critic.json").read_text()


def test_a_checkpoint_without_its_critic_or_of_another_one_is_refused(uninterrupted, tmp_path):
    critic, folder, _whole = uninterrupted
    other = "head" if critic != "head" else "separate"
    with pytest.raises(ConfigError, match=f"critic='{critic}'"):
        ppo_trainers.trainer(other, tmp_path).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    ppo_trainers.actor().save_pretrained(tmp_path / "checkpoint-1")
    with pytest.raises(ConfigError, match="holds no critic"):
        ppo_trainers.trainer("head", tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

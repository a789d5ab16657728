"""A PPO run that stops at any optimizer step and resumes is the run that did not stop, bit for bit."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests import ppo_trainers, tiny
from tests.faults.starting import IS_THOROUGH
from tests.ppo_trainers import CRITICS, distance, resumed_as_whole, stir, trained_weights
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

# Sampled completions, two epochs of two mini-batches an update: four steps an update, and 16 prompts are two of them,
# so that 10 steps reach the second epoch over the data.
RUN = dict(
    max_steps=10,
    num_ppo_epochs=2,
    num_mini_batches=2,
    gradient_accumulation_steps=1,
    rollout_func=None,
    save_strategy="steps",
    save_steps=1,
    kl_coef=0.1,
    kl_target=0.5,
    kl_horizon=100,
    score_normalisation="running",
    score_clip=2.0,
    value_normalisation=True,
)


# Within an epoch, between two, between two updates, and the same in the second epoch over the data.
STOPS = {"adapter": (1, 8), "head": (3, 7), "separate": (4, 9)}


def run(critic, folder, resume_from=None, **changes):
    trainer = ppo_trainers.trainer(critic, folder, **ppo_changes(critic, **RUN | changes))
    if resume_from is None:
        stir(trainer)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer


def ppo_changes(critic, **changes):
    model = ppo_trainers.classifier(9)
    return changes | dict(
        reward_model=model, reward_processing_classes=tiny.tokenizer(), reward_funcs=ppo_trainers.reward
    )


def losses(trainer):
    keys = ("loss", "loss/value_avg", "objective/scores", "objective/kl", "ppo/kl_coef")
    return {log["step"]: [log.get(key) for key in keys] for log in trainer.state.log_history if "loss" in log}


@pytest.fixture(scope="module", params=CRITICS)
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, run(request.param, folder)


def test_the_resumed_run_is_the_uninterrupted_one(uninterrupted, tmp_path):
    critic, folder, whole = uninterrupted
    for step in sum(STOPS.values(), ()) if IS_THOROUGH else STOPS[critic]:
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
    def grpo(folder):
        settings = dict(tiny.QUIET_ON_CPU, save_strategy="steps", save_steps=1, max_steps=5, learning_rate=1e-3)
        settings |= dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=6, num_iterations=2)
        args = GRPOConfig(str(folder), **settings)
        rewards, data = ppo_trainers.share_of_twenty_tokens, ppo_trainers.prompts(4)
        return GRPOTrainer(ppo_trainers.actor(), rewards, args, data, processing_class=tiny.tokenizer())

    resumed_as_whole(grpo, tmp_path, 3)


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
        logits = trainer.model(input_ids=ids).logits
        if critic == "adapter":
            actor = PeftModel.from_pretrained(tiny.model("llama"), folder / "final").eval()
        else:
            actor, report = AutoModelForCausalLM.from_pretrained(folder / "final", output_loading_info=True)
            assert not report["unexpected_keys"] and not report["missing_keys"]
        torch.testing.assert_close(actor(input_ids=ids).logits, logits, rtol=0, atol=1e-6)


def test_a_checkpoint_without_its_critic_is_refused(tmp_path):
    actor = tmp_path / "checkpoint-1"
    ppo_trainers.actor().save_pretrained(actor)
    with pytest.raises(ConfigError, match="holds no critic"):
        ppo_trainers.trainer("head", tmp_path).train(resume_from_checkpoint=str(actor))


def test_a_checkpoint_of_another_critic_is_refused(uninterrupted, tmp_path):
    critic, folder, _whole = uninterrupted
    other = "head" if critic != "head" else "separate"
    with pytest.raises(ConfigError, match=f"critic='{critic}'"):
        ppo_trainers.trainer(other, tmp_path).train(resume_from_checkpoint=str(folder / "checkpoint-1"))

"""What PPO cannot work with costs a sentence before the first step."""

import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import trl_ext
from tests import ppo_trainers, tiny
from tests.reward_trainers import warnings_of
from trl_ext.errors import ConfigError, DataError
from trl_ext.trainers.ppo import inputs

torch.set_num_threads(1)


def config(folder="out", **changes):
    return trl_ext.PPOConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_generations=2, per_device_train_batch_size=3), "3 episodes of an update cannot be split"),
        (dict(num_generations=0), "num_generations=0 must be at least 1"),
        (dict(num_mini_batches=0), "num_mini_batches=0 must be at least 1"),
        (dict(num_mini_batches=2, steps_per_generation=3), "Leave steps_per_generation"),
        (dict(response_length=10, max_completion_length=20), "response_length=10 and max_completion_length=20"),
        (dict(kl_coef=0.1, beta=0.2), "kl_coef=0.1 and beta=0.2 name the same setting"),
        (dict(kl_estimator="k4"), "kl_estimator='k4' is unknown. Use one of: k1, k2, k3"),
        (dict(critic="shared"), "critic='shared' is unknown. Use one of: adapter, head, separate"),
        (dict(score_mode="multiply"), "score_mode='multiply' is unknown"),
        (dict(stop_token="newline"), "stop_token='newline' is unknown"),
        (dict(stop_token="eos", stop_token_id=3), "both set"),
        (dict(lam=1.5), "lam=1.5 must be at least 0 and at most 1"),
        (dict(vf_coef=-0.1), "vf_coef=-0.1 must be at least 0"),
        (dict(missing_eos_penalty=-1.0), "missing_eos_penalty=-1.0 must be at least 0"),
        (dict(total_episodes=0), "total_episodes=0 must be at least 1"),
        (dict(total_episodes=64, max_steps=1), "max_steps=1 has no effect with total_episodes=64"),
        (dict(kl_target=1.0, kl_horizon=4), "kl_horizon=4 is not above"),
        (dict(critic_warmup_steps=9, max_steps=9), "critic_warmup_steps=9 leaves the actor no step of the run's 9"),
        (dict(critic_warmup_steps=4, total_episodes=8), "critic_warmup_steps=4 leaves the actor no step"),
        (dict(score_normalisation="fixed", score_mean=0.0, score_std=0.0), "score_std=0.0 must be"),
        (dict(advantage_estimator="rloo"), "compares the completions of a prompt, and num_generations=1 makes one"),
    ],
)
def test_settings_that_contradict_are_said(changes, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        config(**changes)


def test_an_odd_batch_is_fine_with_one_completion_a_prompt():
    assert config(per_device_train_batch_size=3).generation_batch_size == 3
    assert config(per_device_train_batch_size=1).num_generations == 1


def refusal(folder, critic="head", **changes):
    with pytest.raises((ConfigError, DataError)) as caught:
        ppo_trainers.trainer(critic, folder, **changes)
    return str(caught.value)


@pytest.mark.parametrize("by_launch", [True, False])
def test_a_critic_that_fsdp_cannot_shard(by_launch, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(by_launch).lower())  # as accelerate's launch does
    words = refusal(tmp_path, "separate", **({} if by_launch else {"fsdp": True}))
    assert "critic='separate' is a second trained model" in words


def test_an_adapter_critic_under_zero_3_with_a_deepspeed_that_cannot_recompute_it(monkeypatch):
    monkeypatch.setattr(inputs, "is_older", lambda package, than: (package, than) == ("deepspeed", "0.19.4"))
    args = config(critic="adapter")
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ConfigError, match=r"needs DeepSpeed 0\.19\.4"):
        inputs.choose_critic(args, is_peft=True, value_model=None)
    args.gradient_checkpointing = False
    assert inputs.choose_critic(args, is_peft=True, value_model=None) == "adapter"


def test_a_stop_token_that_no_completion_can_have(tmp_path):
    assert "stop_token_id=1000000 would end no completion" in refusal(tmp_path, stop_token_id=10**6)


def test_a_field_that_was_set_after_the_config_was_made(tmp_path):
    args = config(tmp_path)
    args.gamma = float("nan")
    with pytest.raises(ConfigError, match="gamma=nan must be a finite number"):
        trl_ext.PPOTrainer(args, model="no-model-is-loaded", reward_funcs=ppo_trainers.reward)


def test_the_model_as_its_own_reference(tmp_path):
    model = ppo_trainers.actor()
    assert "ref_model is the model itself" in refusal(tmp_path, model=model, ref_model=model)


def test_a_reference_that_no_kl_is_measured_from(tmp_path):
    words = refusal(tmp_path, ref_model=ppo_trainers.actor(seed=3), kl_coef=0.0)
    assert "ref_model has no use with kl_coef=0" in words


def test_a_reward_model_with_several_labels(tmp_path):
    model = ppo_trainers.classifier(num_labels=3)
    words = refusal(tmp_path, reward_model=model, reward_processing_classes=tiny.tokenizer())
    assert "A reward model has one label" in words and "has 3" in words


def test_a_value_model_of_another_tokenizer(tmp_path):
    model = ppo_trainers.classifier(vocab_size=77)
    words = refusal(tmp_path, "separate", value_model=model)
    assert "77 tokens" in words and "another tokenizer" in words


def test_a_value_model_whose_tokenizer_has_other_words(tmp_path):
    model, tokenizer = ppo_trainers.classifier(), tiny.tokenizer()
    tokenizer.add_tokens("<other>")
    model.save_pretrained(tmp_path / "value")
    tokenizer.save_pretrained(tmp_path / "value")
    assert "has other tokens than the actor's" in refusal(tmp_path, "separate", value_model=str(tmp_path / "value"))


def test_a_value_model_without_one_score_per_token(tmp_path):
    model = ppo_trainers.actor(seed=3)
    assert "without a layer `score`" in refusal(tmp_path, "separate", value_model=model)


def test_a_value_model_with_a_critic_that_has_no_use_for_it(tmp_path):
    assert "value_model has no use with critic='head'" in refusal(tmp_path, value_model=ppo_trainers.classifier())


def test_a_separate_critic_without_a_model(tmp_path):
    assert "critic='separate' needs value_model" in refusal(tmp_path, "separate", value_model=None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("critic", ppo_trainers.CRITICS)
def test_a_critic_whose_values_are_not_finite(critic, value, tmp_path):
    trainer = ppo_trainers.trainer(critic, tmp_path, value_normalisation=True)
    head = trainer._ppo_models.value_model.score if critic == "separate" else trainer._critic.head
    head.weight.data[:] = value
    before = ppo_trainers.trained_weights(trainer)
    with pytest.raises(ConfigError, match=rf"critic='{critic}'\) gave NaN or infinity at \d+ tokens of 8 completions"):
        trainer.train()
    after = ppo_trainers.trained_weights(trainer)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_a_reward_model_that_tells_nothing_apart_is_warned_of_once(tmp_path, caplog):
    model = ppo_trainers.classifier(9)
    model.score.weight.data.zero_()
    settings = dict(reward_model=model, reward_processing_classes=tiny.tokenizer(), score_normalisation="running")
    trainer = ppo_trainers.trainer("head", tmp_path, **settings)
    trainer.train()
    (warning,) = [text for text in warnings_of(caplog) if "taught nothing" in text]
    assert "gave all 8 completions of an update the score 0" in warning
    assert all(log["objective/scores"] == 0 for log in trainer.state.log_history if "objective/scores" in log)


def test_an_adapter_critic_without_peft(tmp_path):
    assert "the actor has none" in refusal(tmp_path, "adapter", peft_config=None)


def test_a_dataset_without_prompts(tmp_path):
    assert "no column 'prompt'" in refusal(tmp_path, data=Dataset.from_dict({"text": ["w3"]}))


def test_nothing_that_scores(tmp_path):
    assert "Nothing scores the completions" in refusal(tmp_path, reward_funcs=None)


def test_a_gate_without_a_reward_model(tmp_path):
    assert "score_mode='gate' needs both" in refusal(tmp_path, score_mode="gate")


def test_the_reward_model_as_value_model(tmp_path):
    model = ppo_trainers.classifier()
    words = refusal(
        tmp_path, "separate", value_model=model, reward_model=model, reward_processing_classes=tiny.tokenizer()
    )
    assert "must not be trained" in words


def test_arguments_of_grpo_in_grpos_order(tmp_path):
    with pytest.raises(ConfigError, match="args is a LlamaForCausalLM"):
        trl_ext.PPOTrainer(ppo_trainers.actor(), ppo_trainers.reward)


def test_reentrant_checkpointing_with_an_adapter_critic(tmp_path):
    trainer = ppo_trainers.trainer(
        "adapter", tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    with pytest.raises(ConfigError, match="cannot keep the adapters of actor and critic apart"):
        trainer.train()


def test_a_reference_adapter_that_is_not_there(tmp_path):
    from peft import get_peft_model

    model = get_peft_model(ppo_trainers.actor(), LoraConfig(**ppo_trainers.LORA))
    words = refusal(tmp_path, "adapter", model=model, peft_config=None, ref_adapter_name="first")
    assert "ref_adapter_name='first' is none of" in words


def test_nothing_was_moved_or_patched_by_a_refusal(tmp_path):
    model = ppo_trainers.actor()
    before = copy.deepcopy(model.state_dict())
    refusal(tmp_path, "separate", model=model, value_model=ppo_trainers.classifier(vocab_size=77))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

"""What PPO cannot work with costs a sentence before the first step."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import trl_ext
from tests import ppo_trainers, tiny
from trl_ext.errors import ConfigError, DataError

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
        (dict(kl_estimator="k2"), "kl_estimator='k2' is unknown. Use one of: k1, k3"),
        (dict(critic="shared"), "critic='shared' is unknown. Use one of: adapter, head, separate"),
        (dict(score_mode="multiply"), "score_mode='multiply' is unknown"),
        (dict(stop_token="newline"), "stop_token='newline' is unknown"),
        (dict(stop_token="eos", stop_token_id=3), "both set"),
        (dict(lam=1.5), "lam=1.5 must be at least 0 and at most 1"),
        (dict(vf_coef=-0.1), "vf_coef=-0.1 must be at least 0"),
        (dict(missing_eos_penalty=-1.0), "missing_eos_penalty=-1.0 must be at least 0"),
        (dict(total_episodes=0), "total_episodes=0 must be at least 1"),
        (dict(total_episodes=64, max_steps=1), "max_steps=1 has no effect beside total_episodes=64"),
        (dict(kl_target=1.0, kl_horizon=4), "kl_horizon=4 is not above"),
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


@pytest.mark.parametrize(
    ("critic", "words"),
    [
        ("separate", "critic='separate' is a second trained model"),
        ("adapter", "critic='adapter' trains other weights"),
    ],
)
@pytest.mark.parametrize("by_launch", [True, False])
def test_a_critic_that_fsdp_cannot_shard(critic, words, by_launch, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(by_launch).lower())  # as accelerate's launch does
    assert words in refusal(tmp_path, critic, **({} if by_launch else {"fsdp": True}))


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

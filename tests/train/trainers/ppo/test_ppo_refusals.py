"""What PPO cannot work with costs a sentence before the first step."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import trl_ext
from tests import ppo_trainers, tiny
from trl_ext.errors import ConfigError, DataError, GradientError
from trl_ext.trainers.ppo import inputs, models


def config(folder="out", **changes):
    return trl_ext.PPOConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **changes)


CONTRADICTIONS: list[tuple[dict, str]] = [
    (dict(num_generations=2, per_device_train_batch_size=3), "3 episodes of an update cannot be split"),
    (
        dict(num_generations=2, per_device_train_batch_size=2, per_device_eval_batch_size=3, eval_strategy="steps"),
        "An evaluation batch of 3 rows cannot be split into groups of num_generations=2",
    ),
    (dict(num_mini_batches=2, steps_per_generation=3), "Leave steps_per_generation"),
    (dict(response_length=10, max_completion_length=20), "response_length=10 and max_completion_length=20"),
    (dict(kl_coef=0.1, beta=0.2), "kl_coef=0.1 and beta=0.2 name the same setting"),
    (dict(total_episodes=64, max_steps=1), "max_steps=1 has no effect with total_episodes=64"),
    (dict(kl_target=1.0, kl_horizon=4), "kl_horizon=4 is not above"),
    (dict(critic_warmup_steps=9, max_steps=9), "critic_warmup_steps=9 leaves the actor no step of the run's 9"),
    (dict(critic_warmup_steps=4, total_episodes=8), "critic_warmup_steps=4 leaves the actor no step"),
    (dict(kl_coef=0.0, kl_target=6.0), "kl_target=6.0 has no effect with kl_coef=0"),
    # Settings that need another one.
    (dict(kl_horizon=100), "kl_horizon=100 has no effect without kl_target"),
    (dict(gate_above=0.5), "gate_above=0.5 has no effect without score_mode='gate'"),
    (dict(kl_coef=0.0, kl_estimator="k3"), "kl_estimator='k3' has no effect with kl_coef=0"),
    (dict(beta=0.0, kl_estimator="k2", kl_term="loss"), "kl_estimator='k2' has no effect with kl_coef=0"),
    (dict(kl_coef=0.0, ref_adapter_name="start"), "ref_adapter_name='start' has no effect with kl_coef=0"),
    # Estimators and critics.
    (dict(advantage_estimator="grpo", num_generations=4, lam=0.5), "lam=0.5 has no effect without"),
    (dict(advantage_estimator="rloo", num_generations=4, gamma=0.5), "gamma=0.5 has no effect without"),
    (dict(advantage_estimator="reinforce_pp", vf_coef=0.5), "vf_coef=0.5 has no effect without"),
    (dict(skip_zero_advantage=True), "without an advantage_estimator that has no critic"),
    (dict(skip_zero_advantage=False), "without an advantage_estimator that has no critic"),
    # Policy losses.
    (dict(loss_type="cispo", epsilon_high=5.0, cliprange=0.1), "cliprange=0.1 has no effect without a loss that"),
    (dict(loss_type="sapo", delta=3.0), "delta=3.0 has no effect without a loss that clips"),
    (dict(loss_type="vespo", epsilon_high=0.3), "epsilon_high=0.3 has no effect without"),
    (dict(sapo_temperature_pos=2.0), "has no effect without loss_type='sapo'"),
    (dict(loss_type="sapo", vespo_k_pos=1.0), "has no effect without loss_type='vespo'"),
]


def test_settings_that_contradict_are_refused_with_their_values(subtests):
    for changes, words in CONTRADICTIONS:
        with subtests.test(changes=changes), pytest.raises(ConfigError, match=re.escape(words)):
            config(**changes)


def test_an_odd_batch_is_fine_with_one_completion_a_prompt():
    assert config(per_device_train_batch_size=3).generation_batch_size == 3
    assert config(per_device_train_batch_size=1).num_generations == 1


def refusal(folder, critic="head", **changes):
    with pytest.raises((ConfigError, DataError)) as caught:
        ppo_trainers.trainer(critic, folder, **changes)
    return str(caught.value)


def test_models_and_data_that_do_not_go_together(subtests, tmp_path):
    model, scorer, tokenizer = ppo_trainers.actor(), ppo_trainers.classifier(), tiny.tokenizer()
    labels, foreign = ppo_trainers.classifier(num_labels=3), ppo_trainers.classifier(vocab_size=77)
    with_adapter = get_peft_model(ppo_trainers.actor(), LoraConfig(**ppo_trainers.LORA))
    with_tokens = get_peft_model(
        ppo_trainers.actor(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    )
    remax = dict(advantage_estimator="remax")
    for critic, changes, words in [
        ("head", dict(stop_token_id=10**6), "stop_token_id=1000000 would end no completion"),
        (
            "none",
            dict(advantage_estimator="rloo", num_generations=4, skip_zero_advantage=True),
            "adds a KL penalty to every row's reward",
        ),
        ("separate", dict(learning_rate=0.0, value_learning_rate=1e-3), "has no effect with learning_rate=0, whose"),
        ("head", dict(model=model, ref_model=model), "ref_model is the model itself"),
        ("separate", dict(model=model, value_model=model), "value_model is the actor itself"),
        ("none", dict(advantage_estimator="reinforce_pp", reward_adapter=str(tmp_path)), "reward_adapter has no use"),
        ("head", dict(ref_model=ppo_trainers.actor(seed=3), kl_coef=0.0), "ref_model has no use with kl_coef=0"),
        (
            "head",
            dict(reward_model=labels, reward_processing_classes=tokenizer),
            "one label; reward_model_0 has 3",
        ),
        (
            "head",
            dict(reward_model=foreign, reward_processing_classes=tokenizer),
            "has an embedding of 77 tokens, and the tokenizer that reads for it has token 198",
        ),
        (
            "head",
            dict(reward_model=scorer, reward_processing_classes=[tokenizer, tokenizer]),
            "2 reward_processing_classes for 1 reward models. Give one for each",
        ),
        ("separate", dict(value_model=foreign), f"77 tokens, the actor {tiny.VOCAB}: it has another"),
        ("separate", dict(value_model=ppo_trainers.actor(seed=3)), "without a layer `score`"),
        ("separate", dict(value_model=None), "critic='separate' needs value_model"),
        ("separate", dict(value_model=scorer, reward_model=scorer), "must not be trained"),
        ("head", dict(value_model=scorer), "value_model has no use with critic='head'"),
        ("none", dict(value_model=scorer, advantage_estimator="reinforce_pp"), "value_model has no use"),
        ("none", remax, "compares with greedy completions"),
        ("head", dict(max_tokens_per_forward=13), "tokens and a completion of up to 12 make 21. Set it to"),
        ("adapter", dict(peft_config=None), "the actor has none"),
        (
            "adapter",
            dict(peft_config=LoraConfig(**ppo_trainers.LORA, modules_to_save=["lm_head", "score"])),
            "modules_to_save=['lm_head'] gives critic='adapter' separate copies",
        ),
        ("adapter", dict(model=with_tokens, peft_config=None), "modules_to_save=['embed_tokens'] gives"),
        ("adapter", dict(ddp_find_unused_parameters=True), "ddp_find_unused_parameters=True"),
        ("adapter", dict(model=with_adapter, peft_config=None, ref_adapter_name="first"), "'first' is none of"),
        ("head", dict(ref_adapter_name="start"), "has no effect: the model has no adapters yet"),
        ("head", dict(data=Dataset.from_dict({"text": ["w3"]})), "no column 'prompt'"),
        ("head", dict(reward_funcs=None), "Nothing scores the completions"),
        ("head", dict(score_mode="gate"), "score_mode='gate' needs both"),
        ("head", dict(score_clip=1.0), "score_clip=1.0 has no effect without a reward model"),
        ("head", dict(reward_tokens_per_forward=99), "has no effect without a reward model"),
    ]:
        with subtests.test(words):
            assert words in refusal(tmp_path, critic, **changes)


def test_a_trainer_without_a_model_and_a_collator_that_is_not_used(caplog):
    with pytest.raises(ConfigError, match="PPOTrainer has no model"):
        trl_ext.PPOTrainer(config(), tiny.tokenizer(), data_collator=list)
    assert "data_collator is not used" in caplog.text


def test_a_value_model_whose_tokenizer_has_other_words(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens("<other>")
    for part in (ppo_trainers.classifier(), tokenizer):
        part.save_pretrained(tmp_path / "value")
    assert "has other tokens than the actor's" in refusal(tmp_path, "separate", value_model=str(tmp_path / "value"))


def test_a_critic_that_fsdp_cannot_shard(tmp_path, monkeypatch):
    words = "critic='separate': FSDP does not split a second trained model"
    assert words in refusal(tmp_path, "separate", fsdp=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate's launch does
    assert words in refusal(tmp_path, "separate")


def test_models_that_zero_3_has_divided(tmp_path, monkeypatch):
    divided = ppo_trainers.scorer()
    divided["reward_model"].score.weight.data = torch.empty(0)  # as DeepSpeed leaves it between two forwards
    words = "cannot read the score of a reward model that ZeRO-3 has divided. Use ZeRO-2"
    assert words in refusal(tmp_path, critic_init="reward", **divided)
    monkeypatch.setattr(models, "is_deepspeed_zero3_enabled", lambda: True)
    assert "so it cannot be copied. Give the model as a path, or give ref_model" in refusal(tmp_path, kl_coef=0.1)


def test_an_adapter_critic_under_zero_3_with_a_deepspeed_that_cannot_recompute_it(monkeypatch):
    monkeypatch.setattr(inputs, "is_older", lambda package, than: (package, than) == ("deepspeed", "0.19.4"))
    args = config(critic="adapter")
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ConfigError, match=r"needs DeepSpeed 0\.19\.4"):
        inputs.choose_critic(args, LoraConfig(), value_model=None)
    args.gradient_checkpointing = False
    assert inputs.choose_critic(args, LoraConfig(), value_model=None) == "adapter"


def test_a_separate_critic_in_fp16():
    args = config(critic="separate")
    args.fp16 = True  # which a CPU does not train in
    with pytest.raises(ConfigError, match="fp16's loss scaling does not know the optimizer of critic='separate'"):
        inputs.choose_critic(args, None, value_model=ppo_trainers.classifier())


@pytest.mark.parametrize(("critic", "value"), [("adapter", math.nan), ("head", math.inf), ("separate", math.nan)])
def test_a_critic_whose_values_are_not_finite(critic, value, tmp_path):
    trainer = ppo_trainers.trainer(critic, tmp_path, value_normalisation=True)
    head = trainer._ppo_models.value_model.score if critic == "separate" else trainer._critic.head
    head.weight.data[:] = value
    before = ppo_trainers.trained_weights(trainer)
    with pytest.raises(GradientError, match="gradient is nan in step 1"):
        trainer.train()
    after = ppo_trainers.trained_weights(trainer)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_arguments_of_grpo_in_grpos_order_and_reentrant_checkpointing_with_an_adapter_critic(tmp_path):
    with pytest.raises(ConfigError, match="args is a LlamaForCausalLM"):
        trl_ext.PPOTrainer(ppo_trainers.actor(), ppo_trainers.reward)
    reentrant = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigError, match="cannot keep the adapters of actor and critic apart"):
        ppo_trainers.trainer("adapter", tmp_path, **reentrant).train()

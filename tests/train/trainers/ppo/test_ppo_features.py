"""What a user of PPO gets: the steps that settings promise, scores from rules and models, models by any way."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification
from trl.generation.vllm_generation import VLLMGeneration

import trl_ext
from tests import ppo_trainers, recipes, tiny
from tests.nightly import daily, nightly
from tests.ppo_trainers import distance, stir, trained_weights
from trl_ext.compat.peft import base_model
from trl_ext.trainers.fit.plan import inputs_of
from trl_ext.trainers.forward.value_head import hidden_from_names

head = partial(ppo_trainers.trainer, "head")


def rollouts(trainer, num=8):
    trainer.model.train()
    return ppo_trainers.completed(trainer, [trainer.train_dataset[i] for i in range(num)])


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


# Steps ---------------------------------------------------------------------------------------------------------------


def test_tokenized_prompts_are_not_tokenized_again(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[0, 0, 5, 9], [44, 7]] * 4, "attention_mask": [[0, 0, 1, 1], [1, 1]] * 4})
    trainer = head(tmp_path, data=rows, rollout_func=None)
    output = rollouts(trainer, 2)
    both = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in both] == [[5, 9], [44, 7]]


@pytest.mark.parametrize(
    "epochs, mini_batches, accumulation", [(1, 1, 1), nightly(4, 1, 2), nightly(2, 3, 1), (3, 2, 2)]
)
def test_epochs_and_mini_batches_give_the_steps_that_they_promise(epochs, mini_batches, accumulation, tmp_path):
    sizes = dict(num_ppo_epochs=epochs, num_mini_batches=mini_batches, gradient_accumulation_steps=accumulation)
    sizes |= dict(per_device_train_batch_size=2, total_episodes=2 * 2 * 6, max_steps=-1)
    trainer = head(tmp_path, data=ppo_trainers.prompts(24), **sizes)
    updates = -(-24 // (2 * accumulation * mini_batches))
    trainer.train()
    assert trainer.state.global_step == updates * epochs * mini_batches
    assert len(logged(trainer, "objective/scores")) == updates
    assert logged(trainer, "episode")[-1] == updates * 2 * accumulation * mini_batches


def test_the_coefficient_that_is_logged_is_the_one_in_the_rewards(tmp_path):
    """With gamma and lam of 1 and a fresh value head, the return of a first token is the sum of all rewards."""
    adapts = dict(kl_coef=0.5, kl_target=0.01, kl_horizon=20)
    trainer = head(tmp_path, ref_model=ppo_trainers.decided_actor(), gamma=1.0, lam=1.0, **adapts)
    for _ in range(2):
        returns = rollouts(trainer)["returns"][:, 0].mean().item()
        metrics = trainer._metrics["train"]
        assert returns == pytest.approx(metrics["objective/rlhf_reward"][-1], abs=1e-6)
    assert metrics["ppo/kl_coef"][0] != metrics["ppo/kl_coef"][1]


# Scores --------------------------------------------------------------------------------------------------------------


def test_rules_and_reward_models_are_logged_apart_and_added(tmp_path):
    weights = dict(reward_funcs=ppo_trainers.reward, reward_weights=[1.0, 0.5], num_generations=4)
    trainer = head(tmp_path, max_steps=1, **weights, **ppo_trainers.scorer())
    trainer.train()
    rule, model = (logged(trainer, f"rewards/{name}/mean")[0] for name in trainer.reward_func_names)
    assert trainer.reward_func_names == ["reward", "reward_model_0"]
    assert logged(trainer, "objective/scores")[0] == pytest.approx(rule + 0.5 * model, abs=1e-6)
    assert logged(trainer, "packing/forwarded_over_raw")[0] < 1, "a prompt's completions share it"


def test_the_gate_asks_the_reward_model_about_what_passes_only(tmp_path):
    def even(completion_ids, **_):
        return [float(len(ids) % 2 == 0) for ids in completion_ids]

    trainer = head(tmp_path, reward_funcs=even, score_mode="gate", **ppo_trainers.scorer())
    asked = []
    model = trainer._ppo_models.rewards[0]
    score = model._score
    model._score = lambda sequences, prompts: asked.append(len(sequences)) or score(sequences, prompts)
    output = rollouts(trainer)
    passes = output["completion_mask"].sum(1) % 2 == 0
    assert asked == [passes.sum()] and 0 < passes.sum() < 8
    assert (trainer._scores[passes] > 1).all() and (trainer._scores[~passes] == 0).all()


def test_an_unscored_completion_is_in_no_loss_and_no_statistic(tmp_path):
    def some(completion_ids, **_):
        return [None if i % 2 else (sum(ids) % 17) / 17 for i, ids in enumerate(completion_ids)]

    halves = stir(head(tmp_path, reward_funcs=some))
    both = rollouts(halves)
    kept = torch.arange(8) % 2 == 0
    assert both["completion_mask"][~kept].sum() == 0
    assert both["advantages"][~kept].abs().sum() == 0

    alone = stir(head(tmp_path))
    alone.model.train()
    expected = ppo_trainers.completed(alone, [alone.train_dataset[i] for i in range(0, 8, 2)])
    width = expected["advantages"].size(1)
    torch.testing.assert_close(both["advantages"][kept][:, :width], expected["advantages"], rtol=0, atol=1e-6)
    assert both["num_items_in_batch"] == expected["num_items_in_batch"]
    assert halves._metrics["train"]["ppo/unscored_frac"] == [0.5]
    assert halves._metrics["train"]["objective/scores"] == pytest.approx(alone._metrics["train"]["objective/scores"])


def test_the_table_of_completions_shows_ppos_advantages_and_no_tensor_of_vocabulary_size_is_kept(tmp_path):
    trainer = head(tmp_path)
    output = rollouts(trainer)
    assert all(value.dim() < 3 for value in output.values() if isinstance(value, torch.Tensor))
    means = output["advantages"].sum(1) / output["completion_mask"].sum(1)
    assert list(trainer._logs["advantages"]) == pytest.approx(means.tolist())
    assert len(set(trainer._logs["advantages"])) > 1


def test_the_penalty_for_a_missing_eos_meets_what_was_cut_off(tmp_path):
    outputs = [rollouts(head(tmp_path, missing_eos_penalty=penalty)) for penalty in (None, 3.0)]
    ends = (outputs[0]["completion_ids"] == 2).any(dim=1)
    last = outputs[0]["completion_mask"].sum(1) - 1
    rewards = [output["returns"][range(8), last] for output in outputs]
    torch.testing.assert_close(rewards[0] - rewards[1], 3.0 * (~ends).float())
    assert 0 < ends.sum() < 8


def test_a_stop_token_ends_completions(tmp_path):
    trainer = head(tmp_path, rollout_func=None, stop_token_id=9, response_length=40)
    trainer.model.lm_head.weight.data[9] += 0.5
    output = rollouts(trainer)
    assert trainer.eos_token_ids == [9]
    for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True):
        kept = ids[mask.bool()].tolist()
        assert 9 not in kept[:-1]


# Models --------------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_given_model_or_its_trained_adapter(tmp_path):
    """A fresh adapter is the model without it; a trained one must be kept."""
    model = get_peft_model(ppo_trainers.actor(), LoraConfig(**ppo_trainers.LORA))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted = ppo_trainers.trainer("adapter", tmp_path, model=model, peft_config=None)
    given = head(tmp_path, model=ppo_trainers.actor(seed=4))
    for trainer in (adapted, given):
        rollouts(trainer)
        assert trainer._metrics["train"]["objective/kl"] == pytest.approx([0.0], abs=1e-5)
    trained = {n.split(".")[-2] for n, p in adapted.model.named_parameters() if p.requires_grad and "lora" in n}
    assert trained == {"default", "critic"} and given.ref_model is not given.model


@pytest.mark.parametrize("packing", daily([True, False], True))
def test_reference_rewards_and_actor_share_one_backbone(packing, tmp_path):
    """Reward models of any rank, trained as LoRA of the same base, score as further adapters what they score alone."""
    ppo_trainers.actor().save_pretrained(tmp_path / "base")
    folders, models = [str(tmp_path / "a" / "reward"), str(tmp_path / "b" / "reward")], []
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        lora = LoraConfig(**{**ppo_trainers.LORA, "r": 2 + 6 * seed}, task_type="SEQ_CLS", init_lora_weights=False)
        models.append(get_peft_model(alone, lora).eval())
        models[-1].save_pretrained(folder)
    settings = dict(reward_funcs=None, reward_adapter=folders, reward_weights=[1.0, 0.5])
    start = dict(critic_init="reward", save_strategy="steps", save_steps=2)
    trainer = ppo_trainers.trainer("adapter", tmp_path, packing=packing, **settings, **start)
    assert (inputs_of(trainer).num_reward_models, inputs_of(trainer).num_reward_adapters) == (0, 2)
    prompts, completions = ["w3 w4", "w3 w4", "w9"], [" w5 w6", " w7", " w8 w8 w8"]
    texts = [f"{prompt}{completion}<eos>" for prompt, completion in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        ids = [tiny.tokenizer()(text, return_tensors="pt")["input_ids"] for text in texts]
        expected = [torch.cat([alone(input_ids=i).logits[:, 0] for i in ids]) for alone in models]
        critic, *rewards = (
            trainer.model(input_ids=ids[0], role=r).token_values for r in ("critic", "reward", "reward_1")
        )
    torch.testing.assert_close(critic, rewards[0])  # the first of them
    assert not torch.allclose(*rewards)
    trainer.model.train()
    for scorer, alone in zip(trainer._ppo_models.rewards, expected, strict=True):
        torch.testing.assert_close(scorer(prompts, completions), alone, rtol=0, atol=5e-6)
    trainer.train()
    first = trainer.state.log_history[0]
    raw = {name: first[f"rewards/{name}/mean"] for name in ("reward", "reward_1")}
    assert raw["reward"] != raw["reward_1"]
    assert first["objective/scores"] == pytest.approx(raw["reward"] + 0.5 * raw["reward_1"], abs=1e-5)
    left = {path.name for path in (tmp_path / "checkpoint-2").iterdir() if path.is_dir()}
    assert left == {"critic"}
    again = ppo_trainers.trainer("adapter", tmp_path / "again", packing=packing, **settings, **start)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(trained_weights(again), trained_weights(trainer)) == 0


def test_vllm_is_given_the_actors_names_only(tmp_path):
    trainer = head(tmp_path)
    names = {name for name, _ in ppo_trainers.actor().named_parameters()}
    pusher = object.__new__(VLLMGeneration)
    pusher.model, pusher._dist = trainer.model, trainer._dist
    pusher.accelerator, pusher.mode = trainer.accelerator, "colocate"
    with hidden_from_names(base_model(trainer.model)):
        assert {name for name, _ in pusher._iter_named_params()} == names
    assert "value_head.weight" in dict(trainer.model.named_parameters())


def test_a_loaded_value_model_is_checkpointed(tmp_path):
    """transformers hands out models in evaluation mode, which never checkpoint."""
    value_model = str(recipes.save(tmp_path / "value", ppo_trainers.classifier()))
    options = dict(value_model=value_model, gradient_checkpointing=True, max_steps=1)
    trainer = ppo_trainers.trainer("separate", tmp_path, **options)
    recomputed = []
    layer = trainer._ppo_models.value_model.model.layers[0]
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *a, **k: recomputed.append(torch.is_grad_enabled()) or forward(*a, **k)
    trainer.train()
    # Per micro-batch with gradient: once forward, once again in the backward.
    assert sum(recomputed) == 2 * trainer.args.gradient_accumulation_steps


def test_a_named_adapter_is_trained_and_another_is_its_reference(tmp_path):
    model = get_peft_model(ppo_trainers.actor(), LoraConfig(**ppo_trainers.LORA), adapter_name="policy")
    model.add_adapter("start", LoraConfig(**ppo_trainers.LORA, init_lora_weights=False))
    names = dict(model_adapter_name="policy", ref_adapter_name="start")
    trainer = ppo_trainers.trainer("adapter", tmp_path, model=model, peft_config=None, max_steps=1, **names)
    before = trained_weights(trainer)
    trainer.train()
    assert {name.split(".")[-2] for name in before if "lora" in name} == {"policy", "critic"}
    assert abs(logged(trainer, "objective/kl")[0]) > 1e-4


def test_models_may_be_given_as_paths_and_two_roles_by_one_path(tmp_path):
    """As in TRL 1.12's scripts, in its order, where reward and value model start from the same weights."""
    sizes = dict(response_length=4, max_steps=1, per_device_train_batch_size=4, num_ppo_epochs=1, logging_steps=1)
    sizes |= dict(stop_token="eos", num_sample_generations=0, local_rollout_forward_batch_size=4)
    args = trl_ext.PPOConfig(str(tmp_path / "out"), **tiny.QUIET_ON_CPU, save_strategy="no", **sizes)
    actor = str(recipes.save(tmp_path / "actor"))
    scorer = str(recipes.save(tmp_path / "reward", ppo_trainers.classifier()))
    trainer = trl_ext.PPOTrainer(args, None, actor, actor, scorer, ppo_trainers.prompts(4), scorer)
    trainer.train()
    assert trainer.reward_func_names == ["reward"]
    assert logged(trainer, "objective/kl") == pytest.approx([0.0], abs=1e-5)

"""PPO with several critics and without one, one after the other, each for a few steps and in a folder of its name."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from tests import ppo_trainers, rollouts
from tests.multi.jobs import shared
from tests.multi.jobs.shared import (
    GRADIENT_ACCUMULATION_STEPS,
    NUM_GENERATIONS,
    NUM_PROMPTS,
    NUM_STEPS,
    ROWS_PER_STEP,
    SETTINGS,
    Rollout,
    engine_facts,
    num_processes,
    prompts,
    release,
    steps_of,
)
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.compat.peft import base_model
from trl_ext.errors import ConfigError

LOGGED = ("loss", "grad_norm", "kl", "objective/kl", "objective/scores", "loss/value_avg", "ppo/explained_variance")


def token_reward(completion_ids, **kwargs):
    """Between 0 and 1, as `shared.token_reward`; one completion in seven cannot be scored."""
    scores = shared.token_reward(completion_ids)
    return [None if sum(ids) % 7 == 0 else score for ids, score in zip(completion_ids, scores, strict=True)]


# Settings by run: each critic, and the estimators without one. Two warm up; the separate critic starts
# from the reward model, on its own schedule; two estimators have the KL in the loss.
KINDS: dict[str, dict] = {
    "adapter": {"critic_warmup_steps": 2},
    "head": {"critic_warmup_steps": 1},
    "separate": {"critic_init": "reward", "value_lr_scheduler_type": "linear"},
    "reinforce_pp": {"advantage_estimator": "reinforce_pp", "gamma": 0.9},
    "rloo": {"advantage_estimator": "rloo", "kl_term": "loss", "kl_estimator": "k2"},
    "grpo": {"advantage_estimator": "grpo", "kl_term": "loss", "kl_estimator": "k3"},
}
CRITICS = ("adapter", "head", "separate")
EVALUATED = (
    "objective/kl",
    "objective/scores",
    "loss/value_avg",
    "ppo/explained_variance",
    "completions/mean_length",
)


def config(folder, critic, adapters, accumulation, fsdp, max_grad_norm, **changes) -> PPOConfig:
    own = dict(KINDS[critic])
    if critic in CRITICS:
        own |= dict(critic=critic, value_learning_rate=5e-3, vf_coef=0.5)
    if critic == "adapter" and adapters:
        own |= dict(score_normalisation="running")
    if critic == "separate":
        own |= dict(score_normalisation="running")
    if own.get("kl_term") != "loss":
        own |= dict(kl_target=0.5, kl_horizon=50)
    if critic not in ("rloo", "grpo"):
        own |= dict(whiten_rewards=True)
    if fsdp:  # by the settings of the run, not of the launch
        own |= dict(fsdp=True, fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})
    settings = dict(
        per_device_train_batch_size=ROWS_PER_STEP // accumulation // num_processes(),
        per_device_eval_batch_size=ROWS_PER_STEP // num_processes(),
        gradient_accumulation_steps=accumulation,
        num_generations=NUM_GENERATIONS,
        # An odd step lies in the middle of an update: its rollouts are trained on once more.
        num_ppo_epochs=2,
        response_length=16,
        # Room for one to three rows, so that the ranks need unequal numbers of forwards and must agree on one.
        max_tokens_per_forward=24 if changes.get("packing") else None,
        packing=False,
        gradient_checkpointing=True,
        max_grad_norm=max_grad_norm,
        kl_coef=0.1,
        missing_eos_penalty=0.3,
    )
    return PPOConfig(str(folder), **SETTINGS | settings | own | changes)


class Forwards:
    """Counts a model's forwards with gradient, and how often its first layer computes in them."""

    def __init__(self, model):
        self.num_model = self.num_layer = 0
        model.get_input_embeddings().register_forward_pre_hook(self._seen_model)
        # Before and not after it: a recomputation ends as soon as it has all that the backward needs.
        model.model.layers[0].mlp.register_forward_pre_hook(self._seen_layer)

    def _seen_model(self, *_):
        self.num_model += torch.is_grad_enabled()

    def _seen_layer(self, *_):
        self.num_layer += torch.is_grad_enabled()


def train(folder, model, critics, resume_from=None, **options) -> dict:
    """By critic. `resume_from` is the folder of a run of this job, of which the first step is taken over."""
    return {critic: train_one(critic, folder / critic, model, resume_from, **options) for critic in critics}


def train_one(
    critic,
    folder,
    model,
    resume_from,
    reward_model=None,
    adapters=(),
    accumulation=GRADIENT_ACCUMULATION_STEPS,
    fsdp=False,
    lora=False,
    max_grad_norm=0.1,  # less than half of any step's gradient norm, so that every step is clipped
    **changes,
) -> dict:
    """The adapter critic with a LoRA actor and reward adapters; the separate critic with a reward model."""
    rollout, rows = Rollout(), prompts(NUM_STEPS * NUM_PROMPTS)
    try:
        trainer = PPOTrainer(
            config(folder, critic, adapters, accumulation, fsdp, max_grad_norm, **changes),
            model=model,
            reward_model=reward_model if critic == "separate" else None,
            reward_adapter=(adapters or None) if critic == "adapter" else None,
            train_dataset=rows,
            eval_dataset=rows.select(range(2 * NUM_PROMPTS)),
            reward_funcs=token_reward,
            peft_config=LoraConfig(**ppo_trainers.LORA) if lora or critic == "adapter" else None,
            rollout_func=rollout,
        )
    except ConfigError as error:
        return {"refused": str(error)}
    if not resume_from:  # or else its weights come from the checkpoint
        ppo_trainers.stir(trainer)  # before DeepSpeed has the weights
    models = [base_model(trainer.model), trainer._ppo_models.value_model]
    forwards = [Forwards(model) for model in models if model is not None]
    trainer.train(resume_from_checkpoint=resume_from and str(Path(resume_from, critic, "checkpoint-1")))
    trainer.save_model()  # as a user does; under ZeRO-3 it gathers the shards
    steps = steps_of(trainer)
    found = engine_facts(trainer) | {
        "layers_per_forward": [counted.num_layer / counted.num_model for counted in forwards],
        "prompts_of_steps": list(rollout.prompts_of_steps),  # evaluation adds its own
        "max_grad_norm": trainer.args.max_grad_norm,
        "packs": min(log["packing/padded_over_forwarded"] for log in steps) > 1,
        "unscored": [log["ppo/unscored_frac"] for log in steps if "ppo/unscored_frac" in log],
        "kl_coef": trainer._kl.value,
        "logs": [{name: log[name] for name in LOGGED if name in log} for log in steps],
    }
    evaluated = trainer.evaluate()
    found["evaluated"] = {name: evaluated[f"eval_{name}"] for name in EVALUATED if f"eval_{name}" in evaluated}
    release(trainer)
    return found


# Name: critic, whether the actor is a LoRA.
IN_BFLOAT16 = {
    "head": ("head", False),
    "head_lora": ("head", True),
    "separate": ("separate", False),
    "adapter": ("adapter", True),
}


def train_in_bfloat16(folder, names, **models) -> dict:
    """The critics that ZeRO-3 can hold in bfloat16, two steps each."""
    return {name: train_one_in_bfloat16(folder, *IN_BFLOAT16[name], **models) for name in names}


def train_one_in_bfloat16(folder, critic: str, lora: bool, model, reward_model, adapter) -> dict:
    settings = dict(
        critic=critic,
        critic_init="reward" if critic == "adapter" else None,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=2,
        learning_rate=1e-4,
        per_device_train_batch_size=2,
        num_ppo_epochs=2,
        response_length=12,
    )
    trainer = PPOTrainer(
        PPOConfig(str(folder), **SETTINGS | settings),
        AutoTokenizer.from_pretrained(model, padding_side="left"),
        model,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]}),
        value_model=reward_model if critic == "separate" else None,
        reward_funcs=ppo_trainers.reward,
        rollout_func=rollouts.rollout,
        reward_adapter=adapter if critic == "adapter" else None,
        peft_config=LoraConfig(**ppo_trainers.LORA) if lora else None,
    )
    trainer.train()
    found = engine_facts(trainer) | {
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "value_losses": [log["loss/value_avg"] for log in trainer.state.log_history if "loss/value_avg" in log],
    }
    release(trainer)
    return found

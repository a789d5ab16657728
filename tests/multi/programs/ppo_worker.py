"""Trains PPO with several critics and without one, one after the other, each for three steps, and saves the weights.

`test_ppo_zero.py` starts this script as one process, and as two under launch files that we ship. Completions and
rewards depend on nothing but the prompt, so that the weights may differ only by the order in which floating-point
numbers were added.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig

from tests.multi.programs import zero_worker
from tests.multi.programs.zero_worker import (
    GRADIENT_ACCUMULATION_STEPS,
    NUM_GENERATIONS,
    NUM_PROMPTS,
    NUM_STEPS,
    Rollout,
)
from tests.ppo_trainers import LORA, stir
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.compat.peft import base_model
from trl_ext.errors import ConfigError

ROWS_PER_STEP = NUM_PROMPTS * NUM_GENERATIONS
# Less than half of any step's gradient norm, so that every step is clipped.
MAX_GRAD_NORM = 0.1
LOGGED = ("loss", "grad_norm", "kl", "objective/kl", "objective/scores", "loss/value_avg", "ppo/explained_variance")


def token_reward(completion_ids, **kwargs):
    """Between 0 and 1, as `zero_worker.token_reward`; one completion in seven cannot be scored."""
    scores = zero_worker.token_reward(completion_ids)
    return [None if sum(ids) % 7 == 0 else score for ids, score in zip(completion_ids, scores, strict=True)]


# What a run has of its own: each critic, and the estimators without one. Two warm up; the separate critic starts
# from the reward model, on a course of its own; two estimators have the KL in the loss.
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


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward_model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--critics", nargs="+", required=True)
    parser.add_argument("--reward_adapters", nargs="*", help="folders; of the critic of kind adapter")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--accumulation", type=int, default=GRADIENT_ACCUMULATION_STEPS)
    parser.add_argument("--sequence_parallel", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=MAX_GRAD_NORM)
    parser.add_argument("--fsdp", action="store_true", help="shard by the settings of the run, not of the launch")
    parser.add_argument("--save_every_step", action="store_true")
    parser.add_argument("--resume_from", help="folder of a run of this script; resumes from its first step")
    return parser.parse_args()


def config(options: argparse.Namespace, critic: str, folder: Path) -> PPOConfig:
    own = dict(KINDS[critic])
    if critic in CRITICS:
        own |= dict(critic=critic, value_learning_rate=5e-3, vf_coef=0.5)
    if critic == "adapter" and options.reward_adapters:
        own |= dict(score_normalisation="running")
    if critic == "separate":
        own |= dict(score_normalisation="running")
    if own.get("kl_term") != "loss":
        own |= dict(kl_target=0.5, kl_horizon=50)
    if critic not in ("rloo", "grpo"):
        own |= dict(whiten_rewards=True)
    return PPOConfig(
        output_dir=str(folder),
        **own,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=ROWS_PER_STEP // options.accumulation // options.num_processes,
        per_device_eval_batch_size=ROWS_PER_STEP // options.num_processes,
        gradient_accumulation_steps=options.accumulation,
        num_generations=NUM_GENERATIONS,
        # An odd step lies in the middle of an update: its rollouts are trained on once more.
        num_ppo_epochs=2,
        response_length=16,
        packing=options.packing,
        # Room for one to three rows, so that the ranks need unequal numbers of forwards and must agree on one.
        max_tokens_per_forward=24 if options.packing else None,
        sequence_parallel=options.sequence_parallel,
        gradient_checkpointing=True,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        # With the usual 1e-8, gradient entries of the size of rounding noise would move by the whole learning rate.
        adam_epsilon=1e-3,
        weight_decay=0.0,
        max_grad_norm=options.max_grad_norm,
        kl_coef=0.1,
        missing_eos_penalty=0.3,
        logging_steps=1,
        fsdp=options.fsdp or None,
        fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if options.fsdp else None,
        report_to="none",
        save_strategy="steps" if options.save_every_step else "no",
        save_steps=1,
        disable_tqdm=True,
    )


def trainer_with(critic: str, options: argparse.Namespace, folder: Path, rollout: Rollout) -> PPOTrainer:
    """The adapter critic beside a LoRA actor and reward adapters; the separate one beside a reward model."""
    prompts = [" ".join(f"w{(7 * i + j) % 90}" for j in range(2 + i % 5)) for i in range(NUM_STEPS * NUM_PROMPTS)]
    is_separate = critic == "separate"
    trainer = PPOTrainer(
        config(options, critic, folder),
        model=options.model,
        reward_model=options.reward_model if is_separate else None,
        reward_adapter=options.reward_adapters if critic == "adapter" else None,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[: 2 * NUM_PROMPTS]}),
        reward_funcs=token_reward,
        peft_config=LoraConfig(**LORA) if critic == "adapter" else None,
        rollout_func=rollout,
    )
    # Before DeepSpeed has the weights. A resumed run gets its weights from the checkpoint.
    return trainer if options.resume_from else stir(trainer)


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


def facts(trainer: PPOTrainer, rollout: Rollout, forwards: list[Forwards]) -> dict:
    """What the test wants to know about the run, besides the weights."""
    engine = trainer.model_wrapped
    steps = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "world_size": trainer.accelerator.num_processes,
        "zero_stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "num_split_parameters": sum(not getattr(p, "ds_persist", True) for p in trainer.model.parameters()),
        "layers_per_forward": [counted.num_layer / counted.num_model for counted in forwards],
        "prompts_of_steps": list(rollout.prompts_of_steps),  # evaluation adds its own
        "max_grad_norm": trainer.args.max_grad_norm,
        "packs": min(log["packing/padded_over_forwarded"] for log in steps) > 1,
        "unscored": [log["ppo/unscored_frac"] for log in steps if "ppo/unscored_frac" in log],
        "kl_coef": trainer._kl.value,
        "logs": [{name: log[name] for name in LOGGED if name in log} for log in steps],
    }


def train(critic: str, options: argparse.Namespace) -> dict:
    """Train, save into a folder of the critic's name, and say what happened."""
    folder, rollout = Path(options.output_dir, critic), Rollout()
    try:
        trainer = trainer_with(critic, options, folder, rollout)
    except ConfigError as error:
        return {"refused": str(error)}
    checkpoint = options.resume_from and str(Path(options.resume_from, critic, "checkpoint-1"))
    models = [base_model(trainer.model), trainer._ppo_models.value_model]
    forwards = [Forwards(model) for model in models if model is not None]
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # as a user does; under ZeRO-3 it gathers the shards
    found = facts(trainer, rollout, forwards)
    evaluated = trainer.evaluate()
    found["evaluated"] = {name: evaluated[f"eval_{name}"] for name in EVALUATED if f"eval_{name}" in evaluated}
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return found


def main() -> None:
    options = parse_options()
    found = {critic: train(critic, options) for critic in options.critics}
    state = PartialState()
    if state.is_main_process:
        Path(options.output_dir, "facts.json").write_text(json.dumps(found))
    # Leave together: a rank that ends while the other is at work can take it down.
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()

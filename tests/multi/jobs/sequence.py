"""The same on rows of a process's own and on shared rows, by cases in one launch."""

import random
from types import SimpleNamespace
from typing import Any

from accelerate.state import AcceleratorState
from datasets import Dataset

from tests import tiny
from tests.multi.jobs.shared import (
    LORA,
    NUM_GENERATIONS,
    SETTINGS,
    Rollout,
    engine_facts,
    reward_of_long_prompts,
    token_reward,
    zero,
)
from tests.multi.jobs.ulysses import model
from trl_ext import GRPOConfig, GRPOTrainer

WIDTH = 16


class RewardOnce:
    """Scores the completions of the first step; all later ones are equal, and nothing is learned from them."""

    __name__ = "reward_once"

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        self.num_calls += 1
        return token_reward(completion_ids) if self.num_calls == 1 else [1.0] * len(completion_ids)


# By name: the model, and what is set beside `config`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reference model": ("qwen2", dict(beta=0.05)),
    "old policy": ("qwen3", dict(num_iterations=2, loss_type="grpo", max_tokens_per_forward=None)),
    "window": ("mistral_window", dict(gradient_checkpointing=True, share_prompt=False, memory_rehearsal=True)),
    "adapter": ("qwen3", dict(beta=0.05, peft_config=LORA, gradient_checkpointing=True)),
    "evaluation": ("llama", dict(beta=0.05, eval_strategy="steps", eval_steps=1)),
    "nothing to learn": ("llama", dict(rewards=RewardOnce)),
    "vLLM's log-probabilities": ("llama", dict(use_vllm=True)),
    "long prompts": ("qwen3", dict(words=40, max_tokens_per_forward=None)),
    "oversampling": ("llama", dict(oversample=1.5)),
    "resumed": ("llama", dict(beta=0.05, save_strategy="steps", save_steps=1)),
    "zero1": ("llama", dict(deepspeed=zero(1))),
    "zero2": ("qwen3", dict(deepspeed=zero(2), beta=0.05, peft_config=LORA)),
    "zero3": ("qwen3", dict(deepspeed=zero(3), beta=0.05, gradient_checkpointing=True)),
}


def save_models(folder) -> None:
    """Save the models of all cases, each under its family's name."""
    for family in sorted({family for family, _ in CASES.values()}):
        model(family, num_hidden_layers=2).save_pretrained(folder / family)


def completion(prompt: str, sample: int, tokenizer) -> list[int]:
    """Between 1 and 15 tokens, few of them long."""
    dice = random.Random(f"{prompt} {sample}")
    ids = [dice.randrange(4, tiny.VOCAB) for _ in range(dice.randint(1, dice.randint(1, WIDTH - 1)))]
    return [*ids[:-1], tokenizer.eos_token_id] if dice.random() < 2 / 3 else ids


class Sampled(Rollout):
    """With log-probabilities where a vLLM would have given them."""

    def __call__(self, prompts, trainer):
        given = super().__call__(prompts, trainer)
        if trainer.use_vllm:
            given["logprobs"] = [[-5.3 + token % 7 / 10 for token in ids] for ids in given["completion_ids"]]
        return given


def train(folder, models: str, sizes: list[int], cases: list[str]) -> dict:
    """By case and size of groups."""
    found = {}
    for case in cases:
        for size in (1, *sizes):
            found[case, size] = train_one(folder, models, case, size)
            AcceleratorState._reset_state()
    return found


def train_one(folder, models: str, case: str, sequence_parallel: int) -> dict[str, Any]:
    """Train; return the weights, what was logged, the stage of ZeRO, and why no forward is split.

    "resumed" goes on with shared rows from the first step of the run without.
    """
    family, settings = CASES[case]
    unset = {"peft_config": None, "use_vllm": False, "words": 5, "rewards": lambda: reward_of_long_prompts}
    changes = unset | settings
    peft_config, use_vllm, words, rewards = map(changes.pop, ("peft_config", "use_vllm", "words", "rewards"))
    options = dict(
        sequence_parallel=sequence_parallel,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        num_generations=NUM_GENERATIONS,
        max_completion_length=WIDTH,
        max_tokens_per_forward=24,
        packing=True,
        gradient_checkpointing=False,
        max_steps=2,
        max_grad_norm=0.5,
    )
    out = folder / case.replace(" ", "_")  # a folder holds checkpoints of one run
    args = GRPOConfig(str(out), **SETTINGS | options | changes)
    prompts = [" ".join(f"w{3 + (7 * i + j) % 90}" for j in range(2 + i % words)) for i in range(24)]
    trainer = GRPOTrainer(
        model=f"{models}/{family}",
        reward_funcs=token_reward if args.beta else rewards(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:5]}),
        processing_class=tiny.tokenizer(),
        rollout_func=Sampled(completion),
        peft_config=peft_config,
    )
    if use_vllm:  # as far as the loss knows: `rollout` gives what a vLLM would have
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=1.0)
    trainer.train(str(out / "checkpoint-1") if case == "resumed" and sequence_parallel > 1 else None)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return engine_facts(trainer) | {
        "weights": {name: weight.clone() for name, weight in (weights or {}).items()},
        "logged": trainer.state.log_history,
        "why_not_split": trainer.forward_loop.halving.why_not,
    }

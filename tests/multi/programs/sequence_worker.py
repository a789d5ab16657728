"""Worker of test_sequence_parallel: trains the same on rows of its own and on shared rows, in one launch.

All of it is deterministic: runs may differ only by the order in which floating-point numbers were added.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig

from tests import tiny
from tests.multi.programs.ulysses_worker import model
from tests.multi.programs.zero_worker import NUM_GENERATIONS, reward_of_long_prompts, token_reward
from trl_ext import GRPOConfig, GRPOTrainer

NUM_STEPS = 2
WIDTH = 16
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def zero(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        # Splits every weight, as small as they are.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
        | ({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
    }


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


def save_models(folder: Path) -> None:
    """Save the models of all cases, each under its family's name."""
    for family in sorted({family for family, _ in CASES.values()}):
        model(family, num_hidden_layers=2).save_pretrained(folder / family)


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: between 1 and 15 tokens, by prompt and place among its completions."""
    tokenizer = trainer.processing_class
    first, completions = trainer.accelerator.process_index * len(prompts), []
    for row, prompt in enumerate(prompts, start=first):
        dice = random.Random(f"{prompt} {row % NUM_GENERATIONS}")
        ids = [dice.randrange(4, tiny.VOCAB) for _ in range(dice.randint(1, dice.randint(1, WIDTH - 1)))]
        completions.append([*ids[:-1], tokenizer.eos_token_id] if dice.random() < 2 / 3 else ids)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    sampled = [[-5.3 + token % 7 / 10 for token in ids] for ids in completions] if trainer.use_vllm else None
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": sampled}


def trained(case: str, folder: Path, sequence_parallel: int) -> dict[str, Any]:
    """Train; return the weights, what was logged, the stage of ZeRO, and why no forward is split.

    "resumed" goes on with shared rows from the first step of the run without.
    """
    family, settings = CASES[case]
    unset = {"peft_config": None, "use_vllm": False, "words": 5, "rewards": lambda: reward_of_long_prompts}
    changes = unset | settings
    peft_config, use_vllm, words, rewards = map(changes.pop, ("peft_config", "use_vllm", "words", "rewards"))
    args = GRPOConfig(
        **dict(
            output_dir=str(folder / "out"),
            sequence_parallel=sequence_parallel,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=2,
            num_generations=NUM_GENERATIONS,
            max_completion_length=WIDTH,
            max_tokens_per_forward=24,
            packing=True,
            gradient_checkpointing=False,
            max_steps=NUM_STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            # With the usual 1e-8, gradient entries of the size of rounding noise would move by the learning rate.
            adam_epsilon=1e-3,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
        )
        | tiny.QUIET_ON_CPU
        | changes
    )
    prompts = [" ".join(f"w{3 + (7 * i + j) % 90}" for j in range(2 + i % words)) for i in range(24)]
    trainer = GRPOTrainer(
        model=str(folder / family),
        reward_funcs=token_reward if args.beta else rewards(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:5]}),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
        peft_config=peft_config,
    )
    if use_vllm:  # as far as the loss knows: `rollout` gives what a vLLM would have
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=1.0)
    trainer.train(str(folder / "out" / "checkpoint-1") if case == "resumed" and sequence_parallel > 1 else None)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "weights": {name: weight.clone() for name, weight in (weights or {}).items()},
        "logged": trainer.state.log_history,
        "zero_stage": getattr(trainer.model_wrapped, "zero_optimization_stage", lambda: 0)(),
        "why_not_split": trainer.forward_loop.halving.why_not,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    file, sizes, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    got = {}
    for case in cases:
        for size in (1, *sizes):
            got[case, size] = trained(case, file.parent, size)
            AcceleratorState._reset_state()
    if torch.distributed.get_rank() == 0:
        torch.save(got, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""GRPO with a reward function: Qwen2.5-0.5B-Instruct learns GSM8K.

    python examples/grpo_reward_function.py
    python examples/grpo_reward_function.py --model Qwen/Qwen2.5-1.5B-Instruct --max_steps 50
    accelerate launch --num_processes 8 examples/grpo_reward_function.py

Every field of `GRPOConfig` is an option. docs/grpo.md describes the fields that trl_ext adds to TRL's.
"""

import re
from dataclasses import dataclass

from datasets import load_dataset
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer

SYSTEM = 'Reason step by step. End with "The answer is" and the number.'


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"


def to_row(row):
    """Make a prompt of a question; the answer follows `####` in the solution."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": prompt, "answer": row["answer"].split("####")[1].strip()}


def correct_number(completions, answer, **columns):
    """Return 1.0 for a completion whose last number is the answer, and 0.0 for others."""
    rewards = []
    for messages, gold in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", messages[0]["content"])
        rewards.append(float(bool(numbers) and numbers[-1].replace(",", "") == gold.replace(",", "")))
    return rewards


if __name__ == "__main__":
    parser = TrlParser((Arguments, GRPOConfig))
    parser.set_defaults(
        output_dir="out/grpo_reward_function",
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # 64 completions an optimizer step
        num_generations=8,  # completions a prompt
        max_completion_length=256,  # tokens
        max_steps=200,
    )
    arguments, config = parser.parse_args_and_config()
    dataset = load_dataset("openai/gsm8k", "main", split="train").map(to_row, remove_columns="question")
    trainer = GRPOTrainer(arguments.model, correct_number, config, dataset)
    trainer.train()
    trainer.save_model()

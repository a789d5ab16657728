"""AsyncGRPOTrainer with rules from a YAML file: Qwen2.5-0.5B-Instruct learns GSM8K as a vLLM server generates.

    CUDA_VISIBLE_DEVICES=1 trl vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct      # in a first shell
    CUDA_VISIBLE_DEVICES=0 python examples/grpo_async_rules.py                    # in a second one

It is TRL's trainer, with attention for any device and a report. TRL needs aiohttp for it. The rules score in the
process that it starts for generation. docs/running/overlap.md compares it with `generation_ahead`.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from trl_ext import AsyncGRPOTrainer, RuleSet

SYSTEM = 'Reason step by step. End with "The answer is" and the number.'


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    rules: str = str(Path(__file__).with_name("rules.yaml"))


def to_row(row):
    """Make a prompt of a question; the answer follows `####` in the solution."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": prompt, "answer": row["answer"].split("####")[1].strip()}


if __name__ == "__main__":  # the process for generation imports this file
    parser = TrlParser((Arguments, AsyncGRPOConfig))
    parser.set_defaults(
        output_dir="out/grpo_async_rules",
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # 64 completions an optimizer step
        num_generations=8,  # completions a prompt
        max_completion_length=256,  # tokens
        max_steps=200,
    )
    arguments, config = parser.parse_args_and_config()
    rules = RuleSet.from_yaml(arguments.rules)
    dataset = load_dataset("openai/gsm8k", "main", split="train").map(to_row, remove_columns="question")
    trainer = AsyncGRPOTrainer(arguments.model, rules, config, dataset)
    trainer.train()
    trainer.save_model()

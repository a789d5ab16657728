"""GRPO with rules from a YAML file: Qwen2.5-0.5B-Instruct learns GSM8K.

    python examples/grpo_rules.py
    python examples/grpo_rules.py --rules my_rules.yaml --max_steps 50
    accelerate launch --num_processes 8 examples/grpo_rules.py

docs/rules.md describes the rules. `trl-ext score audit` compares a file of rules with your data before a run.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer, RuleSet

SYSTEM = 'Reason step by step. End with "The answer is" and the number.'


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    rules: str = str(Path(__file__).with_name("rules.yaml"))


def to_row(row):
    """Make a prompt of a question; the answer follows `####` in the solution."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": prompt, "answer": row["answer"].split("####")[1].strip()}


if __name__ == "__main__":
    parser = TrlParser((Arguments, GRPOConfig))
    parser.set_defaults(
        output_dir="out/grpo_rules",
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # 64 completions an optimizer step
        num_generations=8,  # completions a prompt
        max_completion_length=256,  # tokens
        max_steps=200,
    )
    arguments, config = parser.parse_args_and_config()
    rules = RuleSet.from_yaml(arguments.rules)
    question = [{"role": "user", "content": "What is 9 + 9?"}]
    print(rules.explain(question, "9 + 9 is 18. The answer is 18.", answer="18"))  # what each rule gives, and why
    dataset = load_dataset("openai/gsm8k", "main", split="train").map(to_row, remove_columns="question")
    trainer = GRPOTrainer(arguments.model, rules, config, dataset)
    trainer.train()
    trainer.save_model()

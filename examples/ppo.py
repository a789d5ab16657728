"""PPO with LoRA, scored by a rule and, if you give one, by a reward model: Qwen2.5-1.5B-Instruct learns GSM8K.

    python examples/ppo.py
    python examples/ppo.py --reward_model out/reward_model
    accelerate launch --num_processes 4 examples/ppo.py

Policy, critic and reference share one frozen backbone. docs/ppo.md describes the trainer and the other critics.
"""

from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import PPOConfig, PPOTrainer, RuleSet
from trl_ext.rewards import Answer

SYSTEM = 'Reason step by step. End with "The answer is" and the number.'


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    reward_model: str | None = None


def to_row(row):
    """Make a prompt of a question; the answer follows `####` in the solution."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": prompt, "answer": row["answer"].split("####")[1].strip()}


if __name__ == "__main__":
    parser = TrlParser((Arguments, PPOConfig))
    parser.set_defaults(
        output_dir="out/ppo",
        learning_rate=1e-5,
        total_episodes=25_600,  # 100 updates of 256 completions
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_mini_batches=4,  # optimizer steps of a pass over an update
        response_length=256,  # tokens
        kl_coef=0.01,
    )
    arguments, config = parser.parse_args_and_config()
    trainer = PPOTrainer(
        config,
        model=arguments.model,
        reward_model=arguments.reward_model,
        reward_funcs=RuleSet([Answer(gold="answer", kind="number")]),
        train_dataset=load_dataset("openai/gsm8k", "main", split="train").map(to_row, remove_columns="question"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()

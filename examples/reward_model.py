"""A reward model with LoRA: Qwen2.5-0.5B-Instruct learns from UltraFeedback's pairs which answer people prefer.

    python examples/reward_model.py
    python examples/reward_model.py --model Qwen/Qwen2.5-7B-Instruct --max_steps 100
    accelerate launch --num_processes 8 examples/reward_model.py

examples/ppo.py trains against the result. docs/reward.md describes the trainer.
"""

from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import RewardConfig, RewardTrainer, filter_pairs


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"


if __name__ == "__main__":
    parser = TrlParser((Arguments, RewardConfig))
    parser.set_defaults(
        output_dir="out/reward_model",
        learning_rate=1e-4,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # 64 pairs an optimizer step
        max_length=1024,  # tokens of a prompt with one answer; longer pairs are dropped
        eval_strategy="steps",
        eval_steps=100,
    )
    arguments, config = parser.parse_args_and_config()
    pairs = load_dataset("trl-lib/ultrafeedback_binarized")
    train, report = filter_pairs(pairs["train"])  # without empty and identical answers
    print(report)
    trainer = RewardTrainer(
        arguments.model,
        config,
        train_dataset=train,
        eval_dataset=pairs["test"],
        peft_config=LoraConfig(task_type="SEQ_CLS", r=16, target_modules="all-linear", modules_to_save=["score"]),
    )
    trainer.train()
    trainer.save_model()

"""Trains the critics that ZeRO-3 can hold in bfloat16 for two optimizer steps, one after the other."""

import argparse
import json
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from tests.ppo_trainers import LORA, reward
from tests.rollouts import rollout
from trl_ext import PPOConfig, PPOTrainer

# Name: critic, whether the actor is a LoRA.
RUNS = {
    "head": ("head", False),
    "head_lora": ("head", True),
    "separate": ("separate", False),
    "adapter": ("adapter", True),
}


def train(options: argparse.Namespace, critic: str, lora: bool) -> dict:
    args = PPOConfig(
        options.output_dir,
        critic=critic,
        critic_init="reward" if critic == "adapter" else None,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=2,
        learning_rate=1e-4,
        per_device_train_batch_size=2,
        num_ppo_epochs=2,
        response_length=12,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args,
        AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        options.model,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]}),
        value_model=options.reward_model if critic == "separate" else None,
        reward_funcs=reward,
        rollout_func=rollout,
        reward_adapter=options.reward_adapter if critic == "adapter" else None,
        peft_config=LoraConfig(**LORA) if lora else None,
    )
    trainer.train()
    found = {
        "zero_stage": trainer.model_wrapped.zero_optimization_stage(),
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "value_losses": [log["loss/value_avg"] for log in trainer.state.log_history if "loss/value_avg" in log],
    }
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--reward_model", "--reward_adapter", "--output_dir", "--num_processes"):
        parser.add_argument(name)
    options = parser.parse_args()
    found = {name: train(options, *run) for name, run in RUNS.items()}
    state = PartialState()
    if state.is_main_process:
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        Path(options.output_dir, "facts.json").write_text(json.dumps(found))
    # Leave together: a rank that ends while the other is at work can take it down.
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a reward model whose settings `memory` decides, and tells what the engine made of them."""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from tests.multi.programs.reward_worker import pairs
from trl_ext import RewardConfig, RewardTrainer

NUM_STEPS = 3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--memory")
    return parser.parse_args()


def batch(options: argparse.Namespace) -> dict:
    """8 pairs a step: as the plan splits them, or in micro-batches of one with checkpointing."""
    if options.memory:
        return {"memory": options.memory, "global_batch": 8}
    steps = 8 // options.num_processes
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps, "gradient_checkpointing": True}


def main() -> None:
    options = parse_options()
    args = RewardConfig(
        options.output_dir,
        use_cpu=True,
        bf16=False,
        max_steps=NUM_STEPS,
        max_length=128,
        learning_rate=1e-3,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **batch(options),
    )
    rows = Dataset.from_list(list(pairs())[:24])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = RewardTrainer(options.model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    engine = trainer.model_wrapped
    facts = {
        "micro_batch": args.per_device_train_batch_size,
        "steps": args.gradient_accumulation_steps,
        "checkpointing": args.gradient_checkpointing,
        "loss": [log["loss"] for log in trainer.state.log_history if "grad_norm" in log],
    }
    if hasattr(engine, "zero_optimization_stage"):
        facts |= {
            "stage": engine.zero_optimization_stage(),
            "engine_micro_batch": engine.train_micro_batch_size_per_gpu(),
            "engine_steps": engine.gradient_accumulation_steps(),
            "reduce_bucket_size": engine.zero_reduce_bucket_size(),
        }
    if trainer.accelerator.is_main_process:
        Path(options.output_dir, "facts.json").write_text(json.dumps(facts))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

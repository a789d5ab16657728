"""Trains a reward model for a few optimizer steps on given pairs, and saves weights, log and facts.

`test_reward_zero.py` starts this script as one process with TRL's trainer, and as two with ours under the launch files
that we ship. All of it is deterministic, so that the weights may differ only by the order in which floating-point
numbers were added.
"""

import argparse
import json
import random
from pathlib import Path

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

import trl_ext

NUM_STEPS = 6
PAIRS_PER_STEP = 8
GRADIENT_ACCUMULATION_STEPS = 2


def pairs() -> Dataset:
    """Ragged pairs: short ones next to long ones, so that ranks under a budget hold different numbers of them."""
    dice = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{dice.randrange(196)}" for _ in range(count))

    rows = [
        {
            "prompt": words(dice.choice([1, 3, 8, 40])) + " ",
            "chosen": words(dice.randint(1, 12)),
            "rejected": words(dice.randint(1, 12)),
            "margin": dice.random(),
        }
        for _ in range(NUM_STEPS * PAIRS_PER_STEP // 2)
    ]
    return Dataset.from_list(rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--library", choices=["trl", "trl_ext"], default="trl_ext")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--sequence_parallel", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    return parser.parse_args()


def config(options: argparse.Namespace):
    library = {"trl": trl, "trl_ext": trl_ext}[options.library]
    own = {}
    if options.library == "trl_ext":
        own = {
            "packing": True,
            "max_tokens_per_forward": options.budget,
            "sequence_parallel": options.sequence_parallel,
        }
    return library.RewardConfig(
        output_dir=options.output_dir,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PAIRS_PER_STEP // GRADIENT_ACCUMULATION_STEPS // options.num_processes,
        gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS,
        gradient_checkpointing=options.checkpointing,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        # With the usual 1e-8, gradient entries of the size of rounding noise would move by the whole learning rate.
        adam_epsilon=1e-3,
        weight_decay=0.0,
        max_grad_norm=0.5,
        center_rewards_coefficient=0.05,
        logging_steps=1,
        eval_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **own,
    )


def pairs_of_forwards(trainer) -> list[int]:
    """Notes, while the trainer trains, how many pairs each of this rank's forwards holds."""
    noted: list[int] = []
    original = trainer._packed_loss

    def noting(model, rows):
        if trainer.model.training:
            noted.extend(row.num_pairs for row in rows)
        return original(model, rows)

    trainer._packed_loss = noting
    return noted


def main() -> None:
    options = parse_options()
    library = {"trl": trl, "trl_ext": trl_ext}[options.library]
    rows = pairs()
    trainer = library.RewardTrainer(
        model=options.model,
        args=config(options),
        train_dataset=rows.to_iterable_dataset() if options.stream else rows,
        eval_dataset=rows.select(range(12)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear") if options.lora else None,
    )
    forwards = pairs_of_forwards(trainer) if options.library == "trl_ext" else []
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model()  # as a user does; under ZeRO-3 it gathers the shards
    engine = trainer.model_wrapped
    everyone = [forwards]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        everyone = gather_object([forwards])
    if trainer.accelerator.is_main_process:
        steps = [log for log in trainer.state.log_history if "grad_norm" in log]
        facts = {
            "world_size": trainer.accelerator.num_processes,
            "zero_stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
            "pairs_of_forwards": everyone,
            "loss": [log["loss"] for log in steps],
            "accuracy": [log["accuracy"] for log in steps],
            "margin": [log["margin"] for log in steps],
            "grad_norm": [log["grad_norm"] for log in steps],
            "num_tokens": [log["num_tokens"] for log in steps],
            "evaluated": {name: value for name, value in evaluated.items() if "accuracy" in name or "margin" in name},
        }
        Path(options.output_dir, "facts.json").write_text(json.dumps(facts))
    # Leave together: a rank that ends while the other is at work can take it down.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

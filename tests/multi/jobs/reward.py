"""Reward models for a few optimizer steps on given pairs, by TRL's trainer or by ours."""

import random

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

import trl_ext
from tests.multi.jobs.shared import (
    GRADIENT_ACCUMULATION_STEPS,
    SETTINGS,
    engine_facts,
    num_processes,
    steps_of,
)

NUM_STEPS = 6
PAIRS_PER_STEP = 8
LOGGED = ("loss", "accuracy", "margin", "grad_norm", "num_tokens")


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


def train(folder, model, library="trl_ext", steps=NUM_STEPS, lora=False, stream=False, **changes) -> dict:
    own = {"packing": True} if library == "trl_ext" else {}
    settings = dict(
        per_device_train_batch_size=PAIRS_PER_STEP // GRADIENT_ACCUMULATION_STEPS // num_processes(),
        gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS,
        gradient_checkpointing=False,
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        center_rewards_coefficient=0.05,
        per_device_eval_batch_size=12,  # TRL logs means of batches' means
        eval_strategy="no",
    )
    of = {"trl": trl, "trl_ext": trl_ext}[library]
    rows = pairs()
    trainer = of.RewardTrainer(
        model=model,
        args=of.RewardConfig(str(folder), **SETTINGS | settings | own | changes),
        train_dataset=rows.to_iterable_dataset() if stream else rows,
        eval_dataset=rows.select(range(12)),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear") if lora else None,
    )
    forwards = pairs_of_forwards(trainer) if library == "trl_ext" else []
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model()
    logged = {name: [log[name] for log in steps_of(trainer)] for name in LOGGED}
    return (
        engine_facts(trainer) | logged | {"pairs_of_forwards": forwards, "eval_accuracy": evaluated["eval_accuracy"]}
    )


def evaluate(folder, model, cases, **changes) -> list[dict]:
    """Metrics of each case's evaluation, in batches of 4.

    Args:
        folder: Where the trainer writes.
        model: The reward model's folder.
        cases: Number of pairs and settings of each evaluation.
        changes: Settings of all.
    """
    metrics = []
    tokenizer = AutoTokenizer.from_pretrained(model)
    for num_pairs, settings in cases:
        args = trl_ext.RewardConfig(str(folder), **SETTINGS | {"per_device_eval_batch_size": 4} | changes | settings)
        rows = pairs().select(range(num_pairs)).add_column("rule_gap", ([1.0, -1.0, 0.5] * num_pairs)[:num_pairs])
        data = {"train_dataset": pairs(), "eval_dataset": rows}
        found = trl_ext.RewardTrainer(model, args, processing_class=tokenizer, **data).evaluate()
        timed = ("_s", "runtime", "per_second", "preparation_time", "memory")
        metrics.append({name: value for name, value in found.items() if not name.endswith(timed)})
    return metrics


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


def train_by_plan(folder, model, memory=None) -> dict:
    """8 pairs a step, split as `memory` decides, or in micro-batches of one with checkpointing."""
    batch = {"memory": memory, "global_batch": 8}
    if not memory:
        steps = 8 // num_processes()
        batch = dict(per_device_train_batch_size=1, gradient_accumulation_steps=steps, gradient_checkpointing=True)
    own = dict(max_steps=3, max_length=128, learning_rate=1e-3, model_init_kwargs={"dtype": "float32"})
    args = trl_ext.RewardConfig(str(folder), **SETTINGS | own | batch)
    rows = Dataset.from_list(list(pairs())[:24])
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = trl_ext.RewardTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    engine = trainer.model_wrapped
    facts = engine_facts(trainer) | {
        "batch": [args.per_device_train_batch_size, args.gradient_accumulation_steps],
        "checkpointing": args.gradient_checkpointing,
        "loss": [log["loss"] for log in steps_of(trainer)],
    }
    if facts["zero_stage"]:
        facts["engine_batch"] = [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]
        facts["reduce_bucket_size"] = engine.zero_reduce_bucket_size()
    return facts

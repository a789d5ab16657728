"""How much more memory than GRPO does PPO need? LoRA on one frozen backbone, same shapes, same completions.

GRPO with a reference: an adapter, and the backbone alone for the reference. PPO: the same, a second adapter with a
value head as critic, and its optimizer state. Both checkpoint activations, as TRL does unless told otherwise. The
peak is the highest of an update, from the rollout to its last optimizer step: the bytes of all live tensors on a
processor, the allocator's account on a card.

    python benchmarks/ppo_memory.py --output benchmarks/results/ppo_memory_cpu.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from machine import machine, write
from ppo import UpdateEnd, fixed_rollout
from ppo_task import QUICK, Job, Meter, Task, causal_model, policy_adapter, text, tokenizer, with_rollouts
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback

import trl_ext

SHAPE = Task(layers=30, episodes=8, rows=8, prompt=128, completion=128, longest=256, epochs=1, updates=0)
BOUND = 1.25


def settings(task: Task, folder: str) -> dict:
    return dict(
        output_dir=folder,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=task.episodes // task.rows,
        max_completion_length=task.longest,
        num_iterations=task.epochs,
        max_steps=task.epochs,
        beta=0.05,
        # The same for both, so that the sampler deals both the same prompts.
        num_generations=2,
        temperature=1.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=task.bf16,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def reward(completion_ids, **_):
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def trainer(name: str, task: Task, meter: Meter, folder: str):
    job = Job(task, "adapter", lora=True)
    common = dict(
        model=causal_model(task),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [text(prompt) for prompt in task.prompts]}),
        processing_class=tokenizer(task),
        peft_config=policy_adapter(job),
        callbacks=[UpdateEnd(meter, task.epochs)],
        rollout_func=fixed_rollout(task, meter),
    )
    if name == "ppo":
        return trl_ext.PPOTrainer(trl_ext.PPOConfig(**settings(task, folder), critic="adapter"), **common)
    return trl_ext.GRPOTrainer(args=trl_ext.GRPOConfig(**settings(task, folder)), **common)


def work(name: str, path: Path) -> None:
    """One trainer, one update, in this process; prints its figures."""
    task = Job.load(path).task
    with tempfile.TemporaryDirectory() as folder, Meter() as meter:
        run = trainer(name, task, meter, folder)
        run.remove_callback(PrinterCallback)
        run.train()
    meter.report("torch", "transformers", "trl", "peft")


def measured(name: str, task: Task) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        Job(task, "adapter", lora=True).save(path)
        done = subprocess.run(
            [sys.executable, __file__, "--worker", name, str(path)], stdout=subprocess.PIPE, check=True, text=True
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
        return
    task = with_rollouts(
        replace(QUICK, epochs=1, updates=0) if options.quick else replace(SHAPE, layers=options.layers)
    )
    figures = {name: measured(name, task) for name in ("grpo", "ppo")}
    gib = {name: figure["peak_bytes"] / 2**30 for name, figure in figures.items()}
    ratio = gib["ppo"] / gib["grpo"]
    table = Table("trainer", "peak GiB", title=f"LoRA with a reference, {task.layers} layers, {task.tokens} tokens")
    for name, value in gib.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table, f"PPO over GRPO: {ratio:.3f} (asked for: at most {BOUND})")
    if options.output:
        shape = {k: v for k, v in asdict(task).items() if k not in ("prompts", "completions")}
        result = {"machine": machine(), "shape": shape, "peak_gib": gib, "ratio": ratio, "bound": BOUND}
        write(options.output, result | {"versions": figures["ppo"]["versions"]})


if __name__ == "__main__":
    main()

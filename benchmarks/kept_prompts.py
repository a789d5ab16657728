"""What is it worth to forward a prompt once for all forwards of its group? One optimizer step, three ways, one run.

A group of 32 completions behind a long prompt, four rows a forward: TRL's padded micro-batches, ours with the prompt
in each forward, and ours with the prompt kept. Rounds alternate between the ways, so that a busy machine hits all.
Operations are counted by the step plan's own cost (`forward_cost`): tokens, and attention by the width of the model.

    python benchmarks/kept_prompts.py --output benchmarks/results/kept_prompts_cpu.json
"""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
import trl
from datasets import Dataset
from grpo_task import Shape, StepClock, fixed_rollout, lengths, model, reward, tokenizer
from machine import save

import trl_ext
from trl_ext.packing import step_plan

NEVER = 10**12  # a call of the model so dear that no prompt is kept


def step(way: str, shape: Shape, options) -> tuple[float, float]:
    """Train one step after one that warms up; return its seconds, and tokens through the model."""
    library = trl if way == "trl" else trl_ext
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(step_plan, "CALL_COST", NEVER if way == "again" else step_plan.CALL_COST),
    ):
        args = library.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=shape.rows // options.rows,
            num_generations=shape.generations,
            max_completion_length=shape.longest,
            max_steps=2,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=options.checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = StepClock()
        subject = library.GRPOTrainer(
            model(options.layers, options.width),
            reward,
            args,
            Dataset.from_dict({"prompt": [f"w{i + 3}" for i in range(shape.groups)]}),
            processing_class=tokenizer(),
            rollout_func=fixed_rollout(shape, itertools.count(), Shape("warm-up", 16, 16, 16, 0.0, shape.groups, 32)),
            callbacks=[clock],
        )
        subject.remove_callback(transformers.PrinterCallback)
        subject.train()
    tokens = [
        log["packing/forwarded_tokens"] for log in subject.state.log_history if "packing/forwarded_tokens" in log
    ]
    return clock.seconds[1], tokens[-1] if tokens else shape.rows * (shape.prompt + max(lengths(shape, 1)))


def operations(shape: Shape, options, keeps: bool) -> float:
    """Return the cost of the step's plan, in tokens through the linear layers."""
    rows = [
        step_plan.RowSize(i // shape.generations, shape.prompt - 1, own + 1)
        for i, own in enumerate(lengths(shape, seed=1))
    ]
    budget = step_plan.tokens_of_rows(rows, options.rows)
    return sum(step_plan.plan_step(rows, 1, budget, options.width, caches=keeps).costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--mean", type=int, default=128, help="tokens of a completion on the mean")
    parser.add_argument("--generations", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4, help="rows in a forward")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--no_trl", dest="ways", action="store_const", const=("again", "kept"))
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    parser.set_defaults(ways=("trl", "again", "kept"))
    options = parser.parse_args()
    shape = Shape("long prompt", options.prompt, options.mean, 2 * options.mean, 0.5, 1, options.generations)
    seconds = dict.fromkeys(options.ways, 0.0)
    tokens = {}
    for round_ in range(options.rounds):
        for way in options.ways:
            spent, tokens[way] = step(way, shape, options)
            seconds[way] += spent
            print(f"round {round_ + 1}: {way} {spent:.1f} s, {tokens[way]:,.0f} tokens", flush=True)
    asked = operations(shape, options, keeps=False) / operations(shape, options, keeps=True)
    figures = {
        "seconds": {way: round(value, 2) for way, value in seconds.items()},
        "tokens": tokens,
        "again_over_kept": round(seconds["again"] / seconds["kept"], 2),
        "operations_ratio": round(asked, 2),
        "trl_over_kept": round(seconds["trl"] / seconds["kept"], 2) if "trl" in seconds else None,
    }
    print(figures)
    save(
        options.output,
        "kept_prompts",
        model=f"llama, {options.layers} layers of width {options.width}, float32",
        shape=f"prompt {options.prompt}, {options.generations} x {options.mean}, {options.rows} a forward",
        checkpointing=options.checkpointing,
        **figures,
    )


if __name__ == "__main__":
    main()

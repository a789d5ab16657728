"""How much faster is GRPO's update phase packed? Ours against trl.GRPOTrainer, same completions, one run.

The update phase is the old-policy pass, the loss forward and backward, and the optimizer step. Completions come from
a fixed `rollout_func`, so that generation costs nothing and both trainers see the same tokens. Rounds alternate
between the trainers, so that a busy machine hits both. A short batch warms up.

Then the same shapes with five groups, of which three have one reward for all: what leaving them out of the update is
worth on top (`extra_ratio`, ours over ours). The old-policy pass is in both.

    python benchmarks/grpo_update.py --output benchmarks/results/grpo_update_cpu.json
    python benchmarks/grpo_update.py --family qwen3_5 --rows 8 --no_extra  # layers with state; prompt 512
"""

import argparse
import itertools
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
import trl
from datasets import Dataset
from grpo_task import FAMILIES, VOCAB, Shape, StepClock, fixed_rollout, lengths, model, reward, tokenizer
from machine import save
from rich.console import Console
from rich.table import Table

import trl_ext

# Every round draws other completions: seeds 0, 1, ... and 100, 101, ...
FIRST_SEED = 100
FLAT_GROUPS, ALL_GROUPS = 3, 5
ASKED_EXTRA = 1.8


@dataclass(frozen=True)
class Result:
    """Seconds and tokens, summed over the update phases (tokens: of old-policy and loss pass together).

    Args:
        extra_ratio: Our seconds over our seconds where 60 % of the groups have no variance, in five groups.
        extra_token_ratio: The tokens of the same.
    """

    shape: str
    phases: int
    trl_s: float
    ours_s: float
    ratio: float
    asked_ratio: float
    trl_tokens: int
    ours_tokens: int
    tokens_ratio: float
    extra_ratio: float | None = None
    asked_extra_ratio: float = ASKED_EXTRA
    extra_token_ratio: float | None = None


SHAPES = {
    Shape("short", 60, 120, 512, 0.8, groups=4): 5.0,
    Shape("long tail", 150, 300, 2048, 0.8, groups=2): 4.0,
    Shape("long prompt", 1024, 256, 256, 0.0, groups=2): 3.2,
}

# Of families with state. Asked is 85 % of the ratio of tokens.
STATE_SHAPES = {Shape("prompt 512", 512, 64, 64, 0.0, groups=2): 3.8}


def prompts(shape: Shape) -> list[str]:
    return [f"w{i + 3}" for i in range(shape.groups)]


def flat_reward(prompts: list[str], completion_ids: list[list[int]], **columns) -> list[float]:
    """Three of five groups get one reward for all their completions."""
    flat = {f"w{i + 3}" for i in range(FLAT_GROUPS)}
    found = reward(completion_ids)
    return [0.5 if prompt in flat else value for prompt, value in zip(prompts, found, strict=True)]


def trainer(library, shape: Shape, options, round_: int, folder: str, reward_func=reward, rows: int | None = None):
    """A trainer whose every even optimizer step is one update phase: old-policy pass, loss, backward, step."""
    rows = rows or options.rows
    args = library.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=shape.rows // rows,
        num_generations=shape.generations,
        # Two passes over a generation batch, so that TRL asks for the old policy's log-probabilities.
        num_iterations=2,
        max_completion_length=shape.longest,
        max_steps=2 * options.phases + 1,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = StepClock()
    subject = library.GRPOTrainer(
        model(options.layers, options.width, options.family),
        reward_func,
        args,
        Dataset.from_dict({"prompt": prompts(shape)}),
        processing_class=tokenizer(),
        rollout_func=fixed_rollout(shape, itertools.count(FIRST_SEED * round_), warm_up=warm_up(shape)),
        callbacks=[clock],
    )
    subject.remove_callback(transformers.PrinterCallback)
    return clock, subject


def warm_up(shape: Shape) -> Shape:
    return replace(shape, prompt=16, mean=16, longest=16)


def measure(shape: Shape, asked_ratio: float, options) -> Result:
    """Seconds of the same update phases of either trainer, in alternating rounds."""
    seconds, tokens = {}, {}
    for round_ in range(options.rounds):
        for library in (trl, trl_ext):
            add(library.__name__, library, shape, options, round_, seconds, tokens)
    result = Result(
        shape=shape.name,
        phases=options.rounds * options.phases,
        trl_s=round(seconds["trl"], 2),
        ours_s=round(seconds["trl_ext"], 2),
        ratio=round(seconds["trl"] / seconds["trl_ext"], 2),
        asked_ratio=asked_ratio,
        trl_tokens=tokens["trl"],
        ours_tokens=tokens["trl_ext"],
        tokens_ratio=round(tokens["trl"] / tokens["trl_ext"], 2),
    )
    return measure_extra(result, replace(shape, groups=ALL_GROUPS), options) if options.extra else result


def measure_extra(result: Result, shape: Shape, options) -> Result:
    """The same completions with varied rewards, and with rewards of which 60 % of the groups learn nothing."""
    seconds, tokens = {}, {}
    for round_ in range(options.rounds):
        for name, reward_func in (("varied", reward), ("flat", flat_reward)):
            # A group a micro-batch: both runs cut the step alike.
            given = {"reward_func": reward_func, "rows": shape.generations}
            add(name, trl_ext, shape, options, round_, seconds, tokens, **given)
    return replace(
        result,
        extra_ratio=round(seconds["varied"] / seconds["flat"], 2),
        extra_token_ratio=round(tokens["varied"] / tokens["flat"], 2),
    )


def add(name: str, library, shape: Shape, options, round_: int, seconds: dict, tokens: dict, **given) -> None:
    """Train, and add seconds and tokens of the measured update phases to those of `name`."""
    print(f"{shape.name}, round {round_ + 1} of {options.rounds}: {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        clock, subject = trainer(library, shape, options, round_, folder, **given)
        subject.train()
    # Step 0 warms up; odd steps have no old-policy pass.
    seconds[name] = seconds.get(name, 0.0) + sum(clock.seconds[2::2])
    measured = range(1, options.phases + 1)
    tokens[name] = tokens.get(name, 0) + sum(_tokens(subject, library, shape, round_, k) for k in measured)


def _tokens(subject, library, shape: Shape, round_: int, batch: int) -> int:
    """Tokens that went through the model in old-policy and loss pass of a trainer's generation batch."""
    if library is trl_ext:
        key = "packing/forwarded_tokens"
        logged = {entry["step"]: entry[key] for entry in subject.state.log_history if key in entry}
        # Batch k is generated in optimizer step 2k; the log counts steps from 1.
        return round(logged[2 * batch + 1])
    drawn = lengths(shape, FIRST_SEED * round_ + batch)
    return 2 * len(drawn) * (shape.prompt + max(drawn))


def show(results: list[Result]) -> None:
    table = Table(title="GRPO update phase, trl / trl_ext; without groups of one reward on top")
    for column in ("shape", "trl s", "ours s", "ratio", "asked", "trl tokens", "our tokens", "token ratio", "on top"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for r in results:
        values = (r.trl_s, r.ours_s, r.ratio, r.asked_ratio, r.trl_tokens, r.ours_tokens, r.tokens_ratio)
        table.add_row(r.shape, *map(str, values), str(r.extra_ratio or ""))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", help="which shapes to run; all by default")
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--rows", type=int, default=16, help="rows in a micro-batch, of 8 completions a prompt")
    parser.add_argument("--phases", type=int, default=1, help="update phases measured per trainer and round")
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between the trainers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--no_extra", dest="extra", action="store_false", help="leave groups without variance out")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    results = []
    for shape, asked_ratio in (SHAPES if options.family == "llama" else STATE_SHAPES).items():
        if options.shapes is None or shape.name in options.shapes:
            results.append(measure(shape, asked_ratio, options))
            show(results)
            save(
                options.output,
                "grpo_update",
                model=f"{options.family}, {options.layers} layers of width {options.width}, vocabulary {VOCAB}, "
                "bf16 autocast",
                rows_per_micro_batch=options.rows,
                results=[asdict(r) for r in results],
            )


if __name__ == "__main__":
    main()

"""What is sharing the beginnings of forked conversations worth? GRPO's update with it over rows alone, in one run.

A tree of four turns with two answers to each makes 16 conversations. As *traces* each is a completion of one prompt;
as *turns* each of the 30 answers is a row whose prompt is all that came before. Both runs are packed; one has
`share_prompt: false`. `reached` is the ratio of seconds over that of tokens, where every token that rows have in
common counts once. What is scored is fewer tokens only as traces (turns score each token once in both runs), so that
with a head that is large beside the layers less can be reached. Rounds alternate; the median of their ratios counts.
Step 1 warms up.

    python benchmarks/forks.py --output benchmarks/results/forks_cpu.json
"""

import argparse
import os
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
from datasets import Dataset
from grpo_task import FIRST_WORD, VOCAB, StepClock, model, reward, tokenizer
from machine import save
from rich.console import Console
from rich.table import Table

import trl_ext

ASKED = 0.8


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of the prompt and of a turn, whether a row is one turn; `budget` tokens a forward (None: one forward)."""

    name: str
    budget: int | None = None
    by_turn: bool = False
    prompt: int = 256
    turn: int = 128
    depth: int = 4


SHAPES = (Shape("traces"), Shape("traces, cut", 2304), Shape("turns", by_turn=True), Shape("turns, cut", 2304, True))


@dataclass(frozen=True, slots=True)
class Result:
    """Of one optimizer step: seconds and tokens of rows alone and with shared beginnings.

    Args:
        alone_s, shared_s: The least of all rounds.
        ratio: The median of the rounds'.
        tokens: Those that went through the model with shared beginnings.
        unique_tokens: What these would be at best, in one forward.
        reached: `ratio` over rows' tokens / `unique_tokens`.
    """

    shape: Shape
    alone_s: float
    shared_s: float
    ratio: float
    alone_tokens: int
    tokens: int
    unique_tokens: int
    reached: float
    asked: float = ASKED


def rows_of(shape: Shape) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of every row."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_WORD, VOCAB) for _ in range(count)]

    begun = [tokens(shape.prompt)]
    rows = []
    for _ in range(shape.depth):
        turns = [(before, tokens(shape.turn)) for before in begun for _ in range(2)]
        rows += turns if shape.by_turn else []
        begun = [before + turn for before, turn in turns]
    return rows or [(row[: shape.prompt], row[shape.prompt :]) for row in begun]


def step_seconds(shape: Shape, is_shared: bool, options) -> tuple[float, int]:
    """The least seconds of an optimizer step, and the tokens that went through the model in it."""
    rows = rows_of(shape)
    with tempfile.TemporaryDirectory() as folder:
        args = trl_ext.GRPOConfig(
            output_dir=folder,
            packing=True,
            share_prompt=is_shared,
            max_tokens_per_forward=shape.budget,
            per_device_train_batch_size=len(rows),
            num_generations=len(rows),
            max_completion_length=shape.turn * shape.depth,
            max_steps=options.steps + 1,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = StepClock()
        subject = trl_ext.GRPOTrainer(
            model(options.layers, options.width),
            reward,
            args,
            Dataset.from_dict({"prompt": ["w3"]}),
            processing_class=tokenizer(),
            rollout_func=lambda prompts, trainer: {
                "prompt_ids": [prompt for prompt, _ in rows],
                "completion_ids": [own for _, own in rows],
                "logprobs": None,
            },
            callbacks=[clock],
        )
        subject.remove_callback(transformers.PrinterCallback)
        subject.train()
    # Steps shuffle the rows, and a plan over a budget puts others together.
    tokens = [e["packing/forwarded_tokens"] for e in subject.state.log_history if "packing/forwarded_tokens" in e]
    return min(clock.seconds[1:]), round(tokens[-1])


def measure(shape: Shape, options) -> Result:
    found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    for round_ in range(options.rounds):
        for is_shared, steps in found.items():
            print(f"{shape.name}, round {round_ + 1} of {options.rounds}: shared {is_shared}", flush=True)
            steps.append(step_seconds(shape, is_shared, options))
    (alone_s, alone_tokens), (shared_s, tokens) = min(found[False]), min(found[True])
    ratio = statistics.median(alone[0] / shared[0] for alone, shared in zip(*found.values(), strict=True))
    whole = [prompt + own for prompt, own in rows_of(shape)]
    unique = shape.prompt + shape.turn * (2 ** (shape.depth + 1) - 2)
    assert alone_tokens == sum(map(len, whole))
    return Result(
        shape,
        round(alone_s, 3),
        round(shared_s, 3),
        round(ratio, 2),
        alone_tokens,
        tokens,
        unique,
        round(ratio / (alone_tokens / unique), 3),
    )


def show(results: list[Result]) -> None:
    table = Table(title="An update on forked conversations, rows alone / beginnings shared")
    for column in ("shape", "alone s", "shared s", "ratio", "alone tokens", "tokens", "unique", "reached", "asked"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for r in results:
        values = (r.alone_s, r.shared_s, r.ratio, r.alone_tokens, r.tokens, r.unique_tokens, r.reached, r.asked)
        table.add_row(r.shape.name, *map(str, values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES], help="which shapes to run")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a round after the first; the least")
    parser.add_argument("--rounds", type=int, default=5, help="times to alternate; the median ratio counts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    results = []
    for shape in (one for one in SHAPES if one.name in options.shapes):
        results.append(measure(shape, options))
        show(results)
        save(
            options.output,
            "forks",
            model=f"llama, {options.layers} layers of width {options.width}, vocabulary {VOCAB}, bf16 autocast",
            results=[asdict(r) for r in results],
        )


if __name__ == "__main__":
    main()

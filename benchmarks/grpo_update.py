"""How much faster is GRPO's update phase packed? Ours against trl.GRPOTrainer, same completions, one run.

The update phase is the old-policy pass, the loss forward and backward, and the optimizer step. Completions come from
a fixed `rollout_func`, so that generation costs nothing and both trainers see the same tokens. Rounds alternate
between the two trainers, so that a busy machine hits both.

    python benchmarks/grpo_update.py --output benchmarks/results/grpo_update_cpu.json
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
import trl
from datasets import Dataset
from machine import machine
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import trl_ext

VOCAB = 8192
GENERATIONS = 8
# Every round draws other completions: seeds 0, 1, ... and 100, 101, ...
FIRST_SEED = 100


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, and prompts in a generation batch (8 completions each).

    Completions are log-normal with this mean and sigma, cut at `longest`; sigma 0: all equal.
    """

    name: str
    prompt: int
    mean: int
    longest: int
    sigma: float
    groups: int
    asked_ratio: float


@dataclass(frozen=True)
class Result:
    """Seconds and tokens, summed over the update phases (tokens: of old-policy and loss pass together)."""

    shape: str
    phases: int
    trl_s: float
    ours_s: float
    ratio: float
    asked_ratio: float
    trl_tokens: int
    ours_tokens: int
    tokens_ratio: float


SHAPES = (
    Shape("short", 60, 120, 512, 0.8, 4, 4.0),
    Shape("long tail", 150, 300, 2048, 0.8, 2, 3.0),
    Shape("long prompt", 1024, 256, 256, 0.0, 2, 2.5),
)


class StepClock(TrainerCallback):
    """Seconds of each optimizer step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs):
        _wait()
        self._start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        _wait()
        self.seconds.append(time.perf_counter() - self._start)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lengths(shape: Shape, seed: int) -> list[int]:
    """Completion lengths of one generation batch, scaled to the mean before they are cut at the longest."""
    draw = random.Random(seed)
    drawn = [math.exp(draw.gauss(0, shape.sigma)) for _ in range(shape.groups * GENERATIONS)]
    scale = shape.mean / statistics.mean(drawn)
    return [max(1, min(shape.longest, round(x * scale))) for x in drawn]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="w0", eos_token="w2", padding_side="left")


def model(layers: int, width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config)


def trainer(library, shape: Shape, options, round_: int, folder: str):
    """A trainer whose every even optimizer step is one update phase: old-policy pass, loss, backward, step."""
    draws = itertools.count(FIRST_SEED * round_)

    def rollout(prompts, trainer):
        seed = next(draws)
        draw = random.Random(seed)
        ids = {p: [draw.randrange(3, VOCAB) for _ in range(shape.prompt)] for p in dict.fromkeys(prompts)}
        completions = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in lengths(shape, seed)]
        return {"prompt_ids": [ids[p] for p in prompts], "completion_ids": completions, "logprobs": None}

    args = library.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=shape.groups * GENERATIONS // options.rows,
        num_generations=GENERATIONS,
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
        model(options.layers, options.width),
        lambda completion_ids, **_: [len(ids) % 7 / 7 for ids in completion_ids],
        args,
        Dataset.from_dict({"prompt": [f"w{i + 3}" for i in range(shape.groups)]}),
        processing_class=tokenizer(),
        rollout_func=rollout,
        callbacks=[clock],
    )
    subject.remove_callback(transformers.PrinterCallback)
    return clock, subject


def measure(shape: Shape, options) -> Result:
    """Seconds of the same update phases of either trainer, in alternating rounds."""
    seconds = dict.fromkeys(("trl", "trl_ext"), 0.0)
    tokens = dict.fromkeys(("trl", "trl_ext"), 0)
    for round_ in range(options.rounds):
        for library in (trl, trl_ext):
            with tempfile.TemporaryDirectory() as folder:
                clock, subject = trainer(library, shape, options, round_, folder)
                subject.train()
            # Step 0 warms up; odd steps have no old-policy pass.
            seconds[library.__name__] += sum(clock.seconds[2::2])
            measured = range(1, options.phases + 1)
            tokens[library.__name__] += sum(_tokens(subject, library, shape, round_, k) for k in measured)
    return Result(
        shape=shape.name,
        phases=options.rounds * options.phases,
        trl_s=round(seconds["trl"], 2),
        ours_s=round(seconds["trl_ext"], 2),
        ratio=round(seconds["trl"] / seconds["trl_ext"], 2),
        asked_ratio=shape.asked_ratio,
        trl_tokens=tokens["trl"],
        ours_tokens=tokens["trl_ext"],
        tokens_ratio=round(tokens["trl"] / tokens["trl_ext"], 2),
    )


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
    table = Table(title="GRPO update phase, trl / trl_ext")
    for column in ("shape", "trl s", "ours s", "ratio", "asked", "trl tokens", "our tokens", "token ratio"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for r in results:
        values = (r.trl_s, r.ours_s, r.ratio, r.asked_ratio, r.trl_tokens, r.ours_tokens, r.tokens_ratio)
        table.add_row(r.shape, *map(str, values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[s.name for s in SHAPES], help="which shapes to run")
    parser.add_argument("--rows", type=int, default=16, help="rows in a micro-batch, of 8 completions a prompt")
    parser.add_argument("--phases", type=int, default=1, help="update phases measured per trainer and round")
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between the trainers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    results = []
    for shape in SHAPES:
        if shape.name in options.shapes:
            results.append(measure(shape, options))
            show(results)
    if options.output:
        record = {
            "benchmark": "grpo_update",
            "model": f"llama, {options.layers} layers of width {options.width}, vocabulary {VOCAB}, bf16 autocast",
            "rows_per_micro_batch": options.rows,
            "machine": machine(),
            "results": [asdict(r) for r in results],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How much faster is reward-model training packed? Ours against trl.RewardTrainer, same pairs, one run.

Real preference pairs (hh_harmless_1800, from the folder that TRL_EXT_DATA names), bf16, TRL's defaults otherwise. The
model "deep" has 12 layers, checkpoints activations and reads the pairs of another file (gsm8k_pairs_500q): nothing was
tuned on them, and of the tokens that are saved 90 % are asked for as time of updates: forward and backward, without
Adam, which takes as long for any tokens. An optimizer step holds the same pairs in both trainers. Rounds alternate
between the trainers, so that a busy machine hits all of them; the peak memory is that of a process which trains with
one trainer only.

    python benchmarks/reward.py --output benchmarks/results/reward_cpu.json
    python benchmarks/reward.py --models deep --pairs 8 --output benchmarks/results/reward_deep_cpu.json
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from machine import save
from machine import write as write_record
from quickstart.assets import prepare
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, TrainerCallback

import trl_ext

DATA = Path(os.environ.get("TRL_EXT_DATA", "data"))
FILE = "hh_harmless_1800.jsonl.gz"
# The model's pairs. Nothing here was tuned on the second file.
FILES = {"smollm2": FILE, "wide": FILE, "deep": "gsm8k_pairs_500q.jsonl"}
ASKED_RATIO = {8: 3.3}
ASKED_SHARE = 0.9
# Name of a variant: library and arguments.
VARIANTS = {
    "trl": (trl, {}),
    "packed": (trl_ext, {"packing": True, "share_prompt": False}),
    "packed, shared": (trl_ext, {"packing": True}),
}


@dataclass
class Result:
    """Sums over the measured optimizer steps of one variant.

    Args:
        tokens: Through the model; TRL's: padded.
        padded_tokens: What a padded batch of the same pairs takes; known from our trainers only.
        peak_gib: Highest memory of a process that trains this variant alone: of the card, or resident.
        share: Of the token ratio, what the time gains.
        update_s: Of `seconds`, in training steps: forward and backward.
        update_share: Of the token ratio, what the time of updates gains.
        layout_s: Of `seconds`, or beside them, spent on planning and laying out rows.
    """

    model: str
    pairs_per_step: int
    variant: str
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    layout_s: float = 0.0
    padded_tokens: int = 0
    peak_gib: float = 0.0
    ratio: float = 0.0
    token_ratio: float = 0.0
    share: float = 0.0
    update_s: float = 0.0
    update_share: float = 0.0


class StepClock(TrainerCallback):
    """Seconds between the ends of optimizer steps: data, planning, forward, backward, update."""

    def __init__(self):
        self.ends: list[float] = []

    def on_train_begin(self, *args, **kwargs):
        self._note()

    def on_step_end(self, *args, **kwargs):
        self._note()

    def _note(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def pairs(file: str, count: int, seed: int) -> Dataset:
    """The first `count` pairs of a shuffle of the real data."""
    with (gzip.open if file.endswith(".gz") else open)(DATA / file, "rt") as lines:
        found = [json.loads(line) for line in lines]
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected") if name in row} for row in found]
    return Dataset.from_list(rows).shuffle(seed=seed).select(range(count))


def model(name: str, folder: Path):
    """SmolLM2-135M as it is, six random layers as wide as those of a 1.5B model, or twelve of SmolLM2's width."""
    if name == "smollm2":
        return str(folder)
    torch.manual_seed(0)
    width, layers = {"wide": (1536, 6), "deep": (576, 12)}[name]
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        max_position_embeddings=8192,
        num_labels=1,
    )
    return LlamaForSequenceClassification(config)


def train(variant: str, name: str, num_pairs: int, num_steps: int, seed: int) -> Result:
    """Run one trainer for a warm-up step and the measured ones."""
    library, extra = VARIANTS[variant]
    folder = prepare() / "model"
    clock = StepClock()
    with tempfile.TemporaryDirectory() as out:
        args = library.RewardConfig(
            output_dir=out,
            per_device_train_batch_size=num_pairs,
            max_steps=num_steps + 1,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **extra,
            **({"gradient_checkpointing": True} if name == "deep" else {}),
        )
        trainer = library.RewardTrainer(
            model(name, folder),
            args,
            train_dataset=pairs(FILES[name], num_pairs * (num_steps + 1), seed),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        updates = timed_updates(trainer)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry][1:]
    result = Result(name, num_pairs, variant, steps=num_steps, seconds=clock.ends[-1] - clock.ends[1])
    result.update_s = sum(updates[1:])
    result.layout_s = sum(entry.get("phase/layout_s", 0.0) for entry in log)
    result.tokens = round(sum(entry.get("packing/forwarded_tokens", 0) for entry in log))
    result.peak_gib = round(_peak_bytes() / 2**30, 2)
    result.padded_tokens = round(sum(entry.get("packing/padded_tokens", 0) for entry in log))
    return result


def timed_updates(trainer) -> list[float]:
    """Return a list that gets the seconds of every training step of the trainer."""
    seconds, step = [], trainer.training_step

    def timed(*args, **kwargs):
        begin = time.perf_counter()
        loss = step(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        return loss

    trainer.training_step = timed
    return seconds


def _peak_bytes() -> int:
    """Highest memory so far: of the card if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its maximum is handed down from the process that started this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def measure(name: str, num_pairs: int, options) -> list[Result]:
    """All variants on the same steps, in alternating rounds."""
    results = {variant: Result(name, num_pairs, variant) for variant in VARIANTS}
    num_steps = max(options.measured_pairs // num_pairs, 1)
    for round_ in range(options.rounds):
        for variant, result in results.items():
            print(f"{name}, {num_pairs} pairs, round {round_ + 1} of {options.rounds}: {variant}", flush=True)
            part = train(variant, name, num_pairs, num_steps, options.seed + round_)
            result.steps += part.steps
            result.seconds += part.seconds
            result.update_s += part.update_s
            result.layout_s += part.layout_s
            result.tokens += part.tokens
            result.padded_tokens += part.padded_tokens
    results["trl"].tokens = results["packed"].padded_tokens
    base = results["trl"]
    for result in results.values():
        result.ratio = round(base.seconds / result.seconds, 2)
        result.token_ratio = round(base.tokens / result.tokens, 2)
        result.share = round(base.seconds / result.seconds / (base.tokens / result.tokens), 3)
        result.update_share = round(base.update_s / result.update_s / (base.tokens / result.tokens), 3)
    for result in results.values():
        result.seconds, result.update_s = round(result.seconds, 2), round(result.update_s, 2)
        result.layout_s = round(result.layout_s, 3)
    return list(results.values())


def measure_memory(results: list[Result], options) -> None:
    """Peak memory of every variant over two steps, each in a process of its own."""
    for result in results:
        command = [sys.executable, __file__, "--only", result.variant, "--models", result.model]
        command += ["--pairs", str(result.pairs_per_step), "--seed", str(options.seed)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        result.peak_gib = json.loads(answer)["peak_gib"]


def show(results: list[Result]) -> None:
    table = Table(title="Reward-model training, trl / trl_ext")
    names = ("model", "pairs", "variant", "pairs/s", "faster", "asked", "fewer tokens", "share", "of update", "layout")
    names += ("peak GiB",)
    for column in names:
        table.add_column(column, justify="left" if column in ("model", "variant") else "right")
    for r in results:
        asked = f"share {ASKED_SHARE}" if r.model == "deep" else ASKED_RATIO.get(r.pairs_per_step, "")
        asked = asked if r.variant == "packed, shared" else ""
        speed = f"{r.steps * r.pairs_per_step / r.seconds:.2f}"
        layout = f"{r.layout_s / r.seconds:.1%}" if r.layout_s else ""
        values = (r.model, r.pairs_per_step, r.variant, speed, r.ratio, asked, r.token_ratio, r.share)
        values += (r.update_share, layout, r.peak_gib or "")
        table.add_row(*map(str, values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "wide"], choices=FILES)
    parser.add_argument("--pairs", nargs="+", type=int, default=[8, 2, 16, 32], help="pairs per optimizer step")
    parser.add_argument("--measured_pairs", type=int, default=32, help="pairs measured per trainer and round")
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between the trainers")
    parser.add_argument("--seed", type=int, default=0, help="which pairs are drawn")
    parser.add_argument("--memory", nargs="*", type=int, default=[8], help="pairs per step whose peak memory counts")
    parser.add_argument("--memory_of", type=Path, help="measure the peak memory for the figures of this JSON file")
    parser.add_argument("--only", choices=VARIANTS, help="train this variant only, and print one line of JSON")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    for file in {FILES[name] for name in options.models}:
        if not (DATA / file).is_file():
            parser.error(f"{DATA / file} does not exist. Set TRL_EXT_DATA to the folder that holds {file}.")
    datasets.disable_progress_bars()
    if options.only:
        print(json.dumps(asdict(train(options.only, options.models[0], options.pairs[0], 1, options.seed))))
        return
    if options.memory_of:
        add_memory(options)
        return
    results: list[Result] = []
    for num_pairs in options.pairs:
        for name in options.models:
            found = measure(name, num_pairs, options)
            results += found
            show(results)
            if num_pairs in options.memory:
                measure_memory(found, options)
                show(found)
            write(results, options)


def add_memory(options) -> None:
    """Peak memory for figures that are there already."""
    record = json.loads(options.memory_of.read_text())
    results = [Result(**entry) for entry in record["results"]]
    measure_memory([r for r in results if r.pairs_per_step in options.memory], options)
    show(results)
    write_record(options.memory_of, record | {"results": [asdict(r) for r in results]})


def write(results: list[Result], options) -> None:
    """What is measured so far; the shapes to come take a while."""
    asked = {
        "asked_ratio": ASKED_RATIO,
        "asked_share": ASKED_SHARE,
        "files": {r.model: FILES[r.model] for r in results},
    }
    save(options.output, "reward", **asked, results=[asdict(r) for r in results])


if __name__ == "__main__":
    main()

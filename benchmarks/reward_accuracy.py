"""Does packing cost accuracy? Reward models trained by trl and by trl_ext on the same real pairs, several seeds.

SmolLM2-135M-Instruct learns which of two solutions to a grade-school problem is right (gsm8k_pairs_500q, from the
folder that TRL_EXT_DATA names). Held out are the pairs of a fifth of the problems, drawn by the seed. Both see
the same pairs in the same order.

    python benchmarks/reward_accuracy.py --output benchmarks/results/reward_accuracy_cpu.json
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from machine import machine, write
from quickstart.assets import prepare
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import trl_ext

DATA = Path(os.environ.get("TRL_EXT_DATA", "data"))
FILE = "gsm8k_pairs_500q.jsonl"
HELD_OUT_FRAC = 0.2
LIBRARIES = {"trl_ext": (trl_ext, {"packing": True}), "trl": (trl, {})}


@dataclass(frozen=True)
class Result:
    """One trained model: accuracy on the held-out pairs after training, and before it, measured once a seed."""

    library: str
    seed: int
    train_pairs: int
    held_out_pairs: int
    accuracy_before: float | None
    accuracy: float
    train_s: float


def split(seed: int, num_pairs: int) -> tuple[Dataset, Dataset]:
    """Training and held-out pairs; no problem is in both."""
    rows = [json.loads(line) for line in (DATA / FILE).read_text().splitlines()]
    problems = sorted({row["prompt"] for row in rows})
    random.Random(seed).shuffle(problems)
    held_out = set(problems[: round(HELD_OUT_FRAC * len(problems))])
    rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    train = [row for row in rows if row["prompt"] not in held_out]
    random.Random(seed).shuffle(train)
    return Dataset.from_list(train[:num_pairs]), Dataset.from_list([r for r in rows if r["prompt"] in held_out])


def train(name: str, seed: int, options) -> Result:
    """Train and evaluate one model."""
    library, extra = LIBRARIES[name]
    train_rows, held_out = split(seed, options.pairs)
    folder = prepare() / "model"
    with tempfile.TemporaryDirectory() as out:
        args = library.RewardConfig(
            output_dir=out,
            per_device_train_batch_size=options.pairs_per_step,
            per_device_eval_batch_size=8,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            use_cpu=not torch.cuda.is_available(),
            bf16=options.bf16,
            max_length=options.max_length,
            gradient_checkpointing=False,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            eval_strategy="steps" if options.eval_steps else "no",
            eval_steps=options.eval_steps or None,
            **extra,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = library.RewardTrainer(
            str(folder), args, train_dataset=train_rows, eval_dataset=held_out, processing_class=tokenizer
        )
        if not options.verbose:
            trainer.remove_callback(transformers.PrinterCallback)
        # Both trainers start from the same weights: the head is drawn from the seed.
        asks_before = name == "trl_ext" and not options.skip_before
        before = trainer.evaluate()["eval_accuracy"] if asks_before else None
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        after = trainer.evaluate()["eval_accuracy"]
    sizes = len(trainer.train_dataset), len(trainer.eval_dataset)
    return Result(name, seed, *sizes, before, after, round(seconds, 1))


def show(results: list[Result]) -> None:
    table = Table(title="Held-out pair accuracy")
    for column in ("trainer", "seed", "pairs", "held out", "before", "after", "training s"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for r in results:
        accuracies = ("" if r.accuracy_before is None else f"{r.accuracy_before:.1%}", f"{r.accuracy:.1%}")
        table.add_row(r.library, *map(str, (r.seed, r.train_pairs, r.held_out_pairs, *accuracies, r.train_s)))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=160, help="training pairs, before those that are too long go")
    parser.add_argument("--pairs_per_step", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a side; longer pairs are left out")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast; its rounding parts the two trainers")
    parser.add_argument("--skip_before", action="store_true", help="do not measure the untrained model")
    parser.add_argument("--eval_steps", type=int, default=0, help="evaluate during training, too")
    parser.add_argument("--verbose", action="store_true", help="print the trainer's log")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    if not (DATA / FILE).is_file():
        parser.error(f"{DATA / FILE} does not exist. Set TRL_EXT_DATA to the folder that holds {FILE}.")
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    results: list[Result] = []
    for seed in options.seeds:
        for name in options.libraries:
            results.append(train(name, seed, options))
            show(results)
    means = {n: statistics.mean(r.accuracy for r in results if r.library == n) for n in options.libraries}
    print("mean accuracy:", ", ".join(f"{name} {mean:.2%}" for name, mean in means.items()))
    if options.output:
        settings = {
            "epochs": options.epochs,
            "learning_rate": options.learning_rate,
            "bf16": options.bf16,
            "max_length": options.max_length,
            "pairs_per_step": options.pairs_per_step,
        }
        record = {"benchmark": "reward_accuracy", "data": FILE, "machine": machine(), "settings": settings}
        record |= {"mean_accuracy": means, "results": [asdict(r) for r in results]}
        write(options.output, record)


if __name__ == "__main__":
    main()

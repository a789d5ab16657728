"""How much smaller are a rank's activations where processes share each row? Bytes saved by autograd, counted.

One optimizer step of 8 sequences in one forward, on 1, 2 and 4 processes of a processor that share it, without
checkpointing; a Llama with 8 heads and 4 key heads. Each process counts the bytes of its tensors that wait for the
backward at one time, weights apart: figures that a busy machine does not change. Asked of the rank that holds most:
0.55 of one process's bytes on 2 processes, 0.3 on 4.

With shared prompts nothing is asked: behind a prompt, a processor's attention keeps a mask of all queries and keys on
every process, which kernels of cards do not make.

    python benchmarks/sequence_parallel.py --output benchmarks/results/sequence_parallel_cpu.json
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from activations import TRAINERS, Held, trainer
from grpo_task import FIRST_WORD, VOCAB, Shape
from machine import save
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
ASKED = {1: 1.0, 2: 0.55, 4: 0.3}
SHARES = {"grpo": (False, True), "ppo": (False,), "reward": (False, True)}
SHAPE = Shape("", prompt=64, mean=448, longest=448, sigma=0.0, groups=2, generations=4)
WIDTH = 256


def policy(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    size = dict(hidden_size=WIDTH, intermediate_size=WIDTH * 8 // 3, num_hidden_layers=layers)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=8192, **heads, **size))


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return random tokens that depend on the prompt alone, wherever its completions are sampled."""

    def tokens(count: int, *key: Any) -> list[int]:
        return random.Random(repr(key)).choices(range(FIRST_WORD, VOCAB), k=count)

    completions = [tokens(SHAPE.longest, p, i, "completion") for i, p in enumerate(prompts)]
    return {
        "prompt_ids": [tokens(SHAPE.prompt, p) for p in prompts],
        "completion_ids": completions,
        "logprobs": None,
    }


def step(name: str, share_prompt: bool, layers: int, processes: int) -> tuple[int, int]:
    """Return the most bytes that one optimizer step holds on this rank, and the forwards with gradient."""
    budget = 2 * SHAPE.rows * (SHAPE.prompt + SHAPE.longest)  # holds the whole step
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(name, policy(layers), SHAPE, budget, folder, rollout, processes, share_prompt=share_prompt)
        with Held(subject.model) as held:
            subject.train()
    return held.peak, len(held.rows)


def work(options: argparse.Namespace) -> None:
    """Count on this process, one of those that accelerate started."""
    for name, share_prompt in [(one, share) for one in options.trainers for share in SHARES[one]]:
        peak, forwards = step(name, share_prompt, options.layers, options.processes)
        peaks = gather_object([peak]) if options.processes > 1 else [peak]
        if int(os.environ.get("RANK", 0)) == 0:
            found = {"trainer": name, "share_prompt": share_prompt, "forwards": forwards, "bytes": peaks}
            with options.worker.open("a") as file:
                file.write(json.dumps(found) + "\n")


def launched(options: argparse.Namespace, processes: int) -> list[dict]:
    """Return what each trainer held on so many processes."""
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "accelerate_configs/cpu.yaml",
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found")
        command = [*launcher, "--main_process_port", 0, "--num_processes", processes, __file__]
        command += ["--layers", options.layers, "--trainers", *options.trainers]
        command += ["--worker", file, "--processes", processes]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        subprocess.run(list(map(str, command)), check=True, env=os.environ | {"PYTHONPATH": path})
        return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=TRAINERS, choices=TRAINERS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    if options.worker:
        work(options)
        return
    found = {processes: launched(options, processes) for processes in ASKED}
    whole = {(one["trainer"], one["share_prompt"]): max(one["bytes"]) for one in found[1]}
    results = [
        {
            "trainer": one["trainer"],
            "share_prompt": one["share_prompt"],
            "processes": processes,
            "forwards": one["forwards"],
            "held_mib": [round(num_bytes / 2**20, 3) for num_bytes in one["bytes"]],
            "ratio": round(max(one["bytes"]) / whole[one["trainer"], one["share_prompt"]], 3),
            "asked": None if one["share_prompt"] else asked,
        }
        for processes, asked in ASKED.items()
        for one in found[processes]
    ]
    table = Table(title="Saved for backward on each rank")
    for column in ("trainer", "shares prompts", "processes", "forwards", "held MiB", "ratio", "asked"):
        table.add_column(column)
    for one in results:
        table.add_row(*map(str, one.values()))
    Console().print(table)
    save(options.output, "sequence_parallel", layers=options.layers, results=results)


if __name__ == "__main__":
    main()

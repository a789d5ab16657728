"""Would the benchmarks for cards run here? All that they import, and a tiny row of each kind on the processor.

    make gpu-preflight                                  # or with WHEELS=..., in what those make
    python -m benchmarks.gpu.preflight --no_rows        # imports alone

Libraries are imported once: each row is a fork. Exit code 1 if a package is missing or a row breaks; rows of a library
that no folder of wheels has room for are skipped.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from benchmarks.gpu import exact, memory, memory_rows, part, runner, speed, speed_rows
from benchmarks.gpu.wheels import PRESENT, WHEELS, module_of

# Not in a folder of wheels: they are large, and machines with cards have them.
ON_THE_MACHINE = ("torch", "transformers", "accelerate", "numpy", "tokenizers", "safetensors", "huggingface_hub")
# What rows import, down to the last package.
OURS = ("benchmarks.gpu.memory_worker", "benchmarks.gpu.speed_worker", "trl_ext.trainers.ppo.trainer")
# A row of each kind, by its name or a part of it.
STEPS = [f"step/{shape}{engine}" for shape in ("dualkv", "tail") for engine in ("", "-static", "-continuous")]
SPEED = (*(f"{step}/{library}" for step in STEPS for library in ("trl", "trl_ext")), "step/vllm")
SPEED += ("update/dualkv/trl", "update/dualkv/trl_ext", *(f"update/dualkv-{way}" for way in speed_rows.WAYS))
SPEED += ("peers/trl-1.7B/trl_ext", "reward/hh/trl_ext")
SPEED += ("clock/lora-256", "clock/full", "clock/overhead-2", "clock/generate")
MEMORY = ("grpo/full/zero3", "grpo/lora/zero3", "grpo/full/zero0", "ppo-separate/lora/zero0", "native/", "qlora/")
MEMORY += ("ppo-separate/full/zero3", "ppo-adapter/lora/zero2")
EXACT = ("varlen", "merged_prefixes")
# The quickstart's needs a real model.
PARTS = (
    ("prof", "prof/update/tail"),
    ("kernels", "attention/1024+8x512/merged"),
    ("kernels", "attention/1024+8x512/flash_attention_4"),
    ("kernels", "layer/8192x16/once"),
)
LIMIT_S, AT_ONCE = 120.0, 4
# No card: what a process knows of one, its forks cannot use.
SURROUNDINGS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def missing() -> dict[str, str]:
    """Packages that cannot be imported, with the reason."""
    found = {}
    for package in (*ON_THE_MACHINE, *PRESENT, *WHEELS, *OURS):
        try:
            import_module(module_of(package))
        except Exception as error:  # a broken wheel raises anything
            found[package] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def rows() -> dict[str, Callable[[], runner.Record]]:
    """What measures a row of each kind, by part and name."""
    found: dict[str, Callable[[], runner.Record]] = {}
    for one in runner.chosen(memory_rows.ROWS, MEMORY):
        found[f"memory: {one.name}"] = partial(memory.measured, memory_rows.tiny(one), "cpu", None, False, LIMIT_S)
    for row in runner.chosen(exact.all_rows(), EXACT):
        found[f"exact: {row.name}"] = partial(exact.run_row, row, "cpu", "tiny", LIMIT_S)
    for each in runner.chosen(speed_rows.rows("tiny", None, None), SPEED):
        found[f"speed: {each.name}"] = partial(speed.run_row, each, "cpu", LIMIT_S)
    for kind, name in PARTS:
        found[f"{kind}: {name}"] = partial(part.ask, kind, name, "cpu", "tiny", LIMIT_S)
    return found


def in_this_process(command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None) -> Any:
    """What `runner.ask` answers, without starting Python and importing anew."""
    os.environ |= variables or {}
    sys.argv = list(command[1:])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    return runner.read_answer(printed.getvalue(), "")


def gather_as_on_a_card() -> None:
    """Let accelerate gather into one flat tensor: on a processor it fills a list, and nothing of a card's way runs."""
    plain = PartialState.__init__

    def init(self: PartialState, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        self.backend = "nccl"

    PartialState.__init__ = init


def fork(measure: Callable[[], runner.Record], folder: Path) -> None:
    """In a process of its own: write how a row ended, and what it said, into the folder."""
    runner.ask = in_this_process
    gather_as_on_a_card()
    signal.alarm(round(LIMIT_S))  # which ends it
    with (folder / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            (folder / "ended.json").write_text(json.dumps(measure()))
        except Exception:
            traceback.print_exc(file=said)


def ended(folder: Path) -> str:
    """How a row ended, with its reason if it has one."""
    path = folder / "ended.json"
    found = json.loads(path.read_text()) if path.is_file() else None
    found = found or runner.read_answer("", (folder / "said").read_text(errors="replace"))
    return f"{found['status']} {found.get('reason', '')}".strip()


def run(wanted: Mapping[str, Callable[[], runner.Record]], console: Console) -> int:
    """Run all rows, as many at once as there are cores for; the number of those that broke."""
    begun: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for number, (name, measure) in enumerate(wanted.items()):
            while sum(process.is_alive() for process in begun.values()) >= min(os.cpu_count() or 1, AT_ONCE):
                time.sleep(0.05)
            Path(root, str(number)).mkdir()
            begun[name] = get_context("fork").Process(target=fork, args=(measure, Path(root, str(number))))
            begun[name].start()
        broken = 0
        for number, (name, process) in enumerate(begun.items()):
            process.join()
            how = ended(Path(root, str(number)))
            broken += not how.startswith(("measured", "skipped"))
            console.print(f"{name}: {how}", soft_wrap=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no_rows", action="store_true", help="look at the imports alone")
    options, console = parser.parse_args(), Console(width=150, highlight=False, markup=False)
    os.environ |= SURROUNDINGS
    torch.set_num_threads(1)
    lacking = missing()
    for package, reason in lacking.items():
        console.print(f"missing: {package} ({reason})", soft_wrap=True)
    if lacking or options.no_rows:
        console.print("Some packages are missing." if lacking else "All packages can be imported.")
        return bool(lacking)
    wanted = rows()
    broken = run(wanted, console)
    console.print(f"{broken} of {len(wanted)} rows broke." if broken else "Every kind of row runs.")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())

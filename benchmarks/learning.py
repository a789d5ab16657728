"""What training on the quickstart's model learns over seconds, ours beside TRL's: recipe, seed and data are the same.

Both run at once, each in a process that has one core, so that what else the machine does slows both. The clock
stops while held-out problems are answered.

    python benchmarks/learning.py --output benchmarks/results/learning_cpu.json
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import save

LIBRARIES = ("trl_ext", "trl")
PREFIX = "curve: "


def work(library: str, core: int, seed: int, every: int, max_steps: int | None) -> dict[str, Any]:
    """Train in this process; return `race`'s figures and the steps' seconds."""
    os.sched_setaffinity(0, {core})
    import torch

    from benchmarks.quickstart.assets import prepare
    from benchmarks.quickstart.race import race

    torch.set_num_threads(1)
    return race(library, prepare(), "cpu", seed, every, **({"max_steps": max_steps} if max_steps else {}))


def both(start: Callable[[str, int], list[str]]) -> dict[str, dict[str, Any]]:
    """Start a process for each library, wait for both, and read what they printed."""
    cores = sorted(os.sched_getaffinity(0))
    running = {
        library: subprocess.Popen(start(library, cores[number % len(cores)]), stdout=subprocess.PIPE, text=True)
        for number, library in enumerate(LIBRARIES)
    }
    found = {}
    for library, process in running.items():
        lines = [line for line in process.communicate()[0].splitlines() if line.startswith(PREFIX)]
        if process.returncode or not lines:
            raise SystemExit(f"{library} ended with exit code {process.returncode}.")
        found[library] = json.loads(lines[-1].removeprefix(PREFIX))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--every", type=int, default=2, help="steps between two looks at the held-out problems")
    parser.add_argument("--max_steps", type=int, help="fewer steps than the recipe has")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", nargs=2, metavar=("LIBRARY", "CORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        library, core = options.work
        print(PREFIX + json.dumps(work(library, int(core), options.seed, options.every, options.max_steps)))
        return
    given = ["--seed", str(options.seed), "--every", str(options.every)]
    given += ["--max_steps", str(options.max_steps)] if options.max_steps else []
    found = both(
        lambda library, core: [sys.executable, "-m", "benchmarks.learning", *given, "--work", library, str(core)]
    )
    for library, one in found.items():
        print(f"{library:8} {one['seconds']:7.1f} s", *(f"{right:.0%}" for _, _, right in one["curve"]))
    print(f"seconds, TRL's over ours: {found['trl']['seconds'] / found['trl_ext']['seconds']:.2f}")
    save(options.output, "learning", seed=options.seed, cores=1, **found)


if __name__ == "__main__":
    main()

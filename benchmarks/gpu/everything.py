"""All that a card is to measure, over all parts, what is least known and most claimed first.

    make gpu-all GPU_OPTIONS="--minutes 25"             # again and again, until no row is left

A part that fails keeps no other from starting; rows that are in its file already are not run again.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec

from benchmarks.gpu.runner import ROOT
from benchmarks.gpu.wheels import WHEELS, module_of

# Part and rows, in the order of their worth.
ORDER = (
    ("speed", ["update/dualkv"]),
    ("exact", ["varlen", "merged_prefixes"]),
    ("memory", ["/zero3/"]),
    ("memory", ["ppo-separate"]),
    ("memory", ["native/"]),
    ("memory", ["qlora/"]),
    ("speed", ["step/vllm"]),
    ("speed", ["clock/"]),
    ("prof", []),
    ("speed", ["peers/", "reward/"]),
    ("quickstart", []),
    ("kernels", []),
    ("speed", []),
    ("exact", []),
    ("memory", []),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="end after so many minutes")
    options, others = parser.parse_known_args()
    for package in WHEELS:
        if find_spec(module_of(package)) is None:
            print(f"missing: {package}. Rows that need it are skipped, or fail.")
    until_s, ended = time.monotonic() + 60 * options.minutes, 0
    for part, rows in ORDER:
        left = (until_s - time.monotonic()) / 60
        if left <= 0:
            print(f"The {options.minutes:g} minutes are over before {part}. The same command goes on.")
            break
        words = [*(["--rows", *rows] if rows else []), "--minutes", f"{left:.2f}", *others]
        print(f"{part} {' '.join(rows)}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.gpu.{part}", *words]
        ended = subprocess.run(command, cwd=ROOT, check=False).returncode or ended
    return ended


if __name__ == "__main__":
    sys.exit(main())

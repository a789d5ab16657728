"""All that a card is to measure, over all parts: whole steps by every engine first, a row of bytes, then the rest.

    make gpu-all GPU_OPTIONS="--minutes 25"             # again and again, until no row is left

Exit code 2, and no row runs, if a package is missing. A part that fails keeps no other from starting; rows that are in
its file already are not run again.
"""

import argparse
import subprocess
import sys
import time

from benchmarks.gpu import preflight
from benchmarks.gpu.runner import ROOT

# Part and rows, in the order of their worth. `together` is exactness and memory side by side; what measures seconds
# has the card for itself.
ORDER = (
    ("speed", ["step/dualkv", "step/tail"]),
    ("memory", ["grpo/lora/zero3/7B"]),
    ("speed", ["update/dualkv/trl_ext"]),
    ("together", ["varlen", "merged_prefixes", "updates", "reward", "/zero3/", "ppo-separate", "native/", "qlora/"]),
    ("speed", ["update/dualkv", "update/tail"]),
    ("speed", ["step/vllm"]),
    ("speed", ["clock/"]),
    ("prof", []),
    ("speed", ["peers/", "reward/"]),
    ("quickstart", []),
    ("kernels", []),
    ("together", []),
    ("speed", []),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="end after so many minutes")
    parser.add_argument("--anyway", action="store_true", help="go on where packages are missing")
    options, others = parser.parse_known_args()
    lacking = preflight.missing()
    for package, reason in lacking.items():
        print(f"missing: {package} ({reason})")
    if lacking and not options.anyway:
        print("Rows that need them would fail, one after the other. Install them, or give --anyway.")
        return 2
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

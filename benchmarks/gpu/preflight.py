"""Would the benchmarks for cards run here? All that they import, and a tiny row of each kind on the processor.

    make gpu-preflight                                  # or with WHEELS=..., in what those make
    python -m benchmarks.gpu.preflight --no_rows        # imports alone

Exit code 1 if a package is missing or a row ends otherwise than measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks.gpu.runner import ROOT
from benchmarks.gpu.wheels import WHEELS, module_of

# Not in a folder of wheels: they are large, and machines with cards have them.
ON_THE_MACHINE = ("torch", "transformers", "accelerate", "numpy", "tokenizers", "safetensors", "huggingface_hub")
# A row of each kind of worker.
ROWS = {
    "speed": ("update/dualkv/trl_ext", "step/dualkv/trl_ext"),
    "memory": ("grpo/full/zero3", "reward/lora/zero0"),
    "exact": ("merged_prefixes",),
}
SMALL = ("--device", "cpu", "--scale", "tiny", "--minutes", "5")


def missing() -> dict[str, str]:
    """Packages that cannot be imported, with the reason."""
    found = {}
    for package in (*ON_THE_MACHINE, *WHEELS):
        try:
            import_module(module_of(package))
        except Exception as error:  # a broken wheel raises anything
            found[package] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def rows_of(part: str, folder: Path) -> Mapping[str, str]:
    """How the rows of a part ended, with the reason where they have one."""
    output = folder / f"{part}.json"
    words = ["-m", f"benchmarks.gpu.{part}", *SMALL, "--rows", *ROWS[part], "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if not output.is_file():
        return {part: f"failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"}
    found = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return {one["row"]: f"{one['status']} {one.get('reason', '')}".strip() for one in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no_rows", action="store_true", help="look at the imports alone")
    options, console = parser.parse_args(), Console(width=150, highlight=False, markup=False)
    lacking = missing()
    for package, reason in lacking.items():
        console.print(f"missing: {package} ({reason})")
    if lacking or options.no_rows:
        console.print("Some packages are missing." if lacking else "All packages can be imported.")
        return bool(lacking)
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(ROWS)) as at_once:
        for part, found in zip(ROWS, at_once.map(lambda part: rows_of(part, Path(folder)), ROWS), strict=True):
            ended |= found
            for name, how in found.items():
                console.print(f"{part}: {name}: {how}", soft_wrap=True)
    broken = sum(how != "measured" for how in ended.values())
    console.print(f"{broken} of {len(ended)} rows broke." if broken else "Every kind of row runs.")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())

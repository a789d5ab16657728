"""Where a benchmark's numbers were born, and the file that they are kept in."""

import json
import platform
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trl_ext.compat.versions import installed_versions
from trl_ext.scripts.process import LIBRARIES

# A table is not found among what libraries will one day do otherwise.
warnings.filterwarnings("ignore", category=FutureWarning, module=LIBRARIES)


def machine() -> dict[str, str]:
    """Card, processor, threads and versions."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "card": card,
        "cpu": platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **installed_versions("torch", "transformers", "trl", "accelerate"),
    }


def commit() -> str:
    """Short hash of the code that runs, with a `+` where files differ from it; empty outside of a clone."""
    words = ["git", "-C", str(Path(__file__).parent)]
    found = subprocess.run([*words, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    status = [*words, "status", "--porcelain", "--", ":/", ":/!benchmarks/results"]
    changed = subprocess.run(status, capture_output=True, text=True, check=False).stdout
    return found.stdout.strip() + "+" * bool(changed.strip())


def save(path: Path | None, benchmark: str, **figures: Any) -> None:
    """Write figures with machine and versions; nothing without a path."""
    if path:
        write(path, {"benchmark": benchmark, "machine": machine(), **figures})


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Put a record into a JSON file, whole or not at all, with the commit that was measured unless it names one."""
    record = {"commit": commit(), **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)

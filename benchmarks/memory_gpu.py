"""How far are the memory formulas, and the twin, from what a CUDA allocator says? 35 rows, 0.5B to 14B, on one card.

No figure of this benchmark has been measured yet: until a file of its results is committed, every number that the
package gives for memory on a GPU is estimated.

A row is a trainer (reward, GRPO, PPO with each kind of critic) with all weights or LoRA, without DeepSpeed or under
ZeRO-1 to 3: three steps with sequences at their longest, in a process of its own. Models have random weights; nothing
is generated and nothing downloaded. ZeRO rows run rank 0 of N with the real engine and no peers, so NCCL's buffers are
not in. A smaller card is imitated by the most that PyTorch may reserve there. A row that runs out of memory on it says
so, and runs once more with all there is, for its peaks.

    python benchmarks/memory_gpu.py --list
    python benchmarks/memory_gpu.py --twin --output benchmarks/results/memory_gpu_h200.json
    python benchmarks/memory_gpu.py --minutes 9 --resume part.json     # again and again, until no row is left
    python benchmarks/memory_gpu.py --device cpu --scale tiny --rows reward/lora/zero0 grpo/full/zero2
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from machine import machine
from memory_gpu_report import predict, record, sentences, summary, table
from memory_gpu_rows import ROWS, Row, tiny
from rich.console import Console

from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.formulas.peak import usable_bytes
from trl_ext.memory.units import gib
from trl_ext.twin.driver import environment, last_words, simulate
from trl_ext.twin.simulation import Simulation, simulation_of

WORKER = Path(__file__).with_name("memory_gpu_worker.py")
PREFIX = "ROW "  # the worker's, before its answer
TIMEOUT_S = 420.0
NO_CARD = "There is no CUDA card here. Run this on one, or try the benchmark itself: --device cpu --scale tiny."
# Beyond the prediction, for a prediction that is too low and for the CUDA context.
ROOM = 1.1


# One row ------------------------------------------------------------------------------------------------------------


def missing(row: Row) -> str:
    """The library that a row needs and this machine has not."""
    needed = ["peft"] * row.job.uses_lora + ["deepspeed"] * (row.job.zero_stage > 0)
    return next((name for name in needed if find_spec(name) is None), "")


def why_skipped(row: Row, device_bytes: int | None) -> str:
    """Why a row cannot be measured here; empty if it can."""
    if name := missing(row):
        return f"{name} is not installed."
    if device_bytes is not None and ROOM * predict(row)["reserved"] > device_bytes:
        return f"It needs {gib(predict(row)['reserved']):.1f} GiB (estimated), and there are {gib(device_bytes):.1f}."
    return ""


def run_row(row: Row, device: str, device_bytes: int | None) -> dict[str, Any]:
    """Measure a row: on the imitated card, and if that is too small without it.

    Args:
        row: The configuration.
        device: "cuda" or "cpu".
        device_bytes: Memory of this machine's card, None without one.
    """
    if reason := why_skipped(row, device_bytes):
        return {"status": "skipped", "reason": reason}
    cap = int(usable_bytes(row.hardware))
    if device_bytes is None or cap >= device_bytes:
        return {**ask(row, device, None), "fits": None}
    capped = ask(row, device, cap)
    if capped["status"] != "oom":
        return {**capped, "fits": True if capped["status"] == "measured" else None}
    return {**ask(row, device, None), "fits": False, "oom_phase": capped["phase"]}


def ask(row: Row, device: str, cap: int | None) -> dict[str, Any]:
    """The answer of a worker; `failed` with its last words if there is none."""
    simulation = simulation_of(row.job, row.config, row.num_gpus)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"simulation": simulation.as_dict(), "device": device, "cap": cap}))
        command = [sys.executable, str(WORKER), str(task)]
        variables = surroundings(simulation, device, row.job.expandable_segments)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=variables, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"It took more than {TIMEOUT_S:.0f} s."}
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if not lines:
        return {"status": "failed", "reason": f"{last_words(done.stderr)}."}
    return json.loads(lines[-1].removeprefix(PREFIX))


def surroundings(simulation: Simulation, device: str, expandable: bool) -> dict[str, str]:
    """The worker's variables: the twin's, with the card in sight."""
    variables = environment(simulation)
    root = str(Path(__file__).parents[1])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if device == "cuda":
        # One card: with two in sight the Trainer would put a copy of the model on each.
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        variables["DS_ACCELERATOR"] = "cuda"
        variables |= ALLOCATOR if expandable else {}
    return variables


def by_twin(row: Row) -> dict[str, int] | str:
    """The twin's bytes by phase, or why it cannot follow."""
    result = simulate(row.job, row.config, row.num_gpus)
    return result.refusal or {phase: peak.num_bytes for phase, peak in result.peaks.items()}


# All rows -----------------------------------------------------------------------------------------------------------


def chosen(patterns: Sequence[str], scale: str) -> list[Row]:
    """Rows whose name holds one of the patterns."""
    rows = [row for row in ROWS if not patterns or any(pattern in row.name for pattern in patterns)]
    return [tiny(row) for row in rows] if scale == "tiny" else rows


def list_rows(rows: Sequence[Row], console: Console) -> None:
    """What would be measured, with the formulas' answer."""
    for row in rows:
        predicted = predict(row)
        says = "fits" if predicted["fits"] else "does not fit"
        console.print(
            f"{row.name}: rank 0 of {row.num_gpus}, {gib(predicted['allocated']):.1f} GiB allocated and "
            f"{gib(predicted['reserved']):.1f} reserved (estimated), {says} on {row.card}",
            soft_wrap=True,
        )


def card_bytes(device: str) -> int | None:
    """Memory of the card as torch tells it; None on a processor."""
    if device == "cpu":
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def kept_from(path: Path | None) -> list[dict[str, Any]]:
    """Rows of an earlier call; those that failed are tried again."""
    if path is None or not path.is_file():
        return []
    return [one for one in json.loads(path.read_text(encoding="utf-8"))["rows"] if one["status"] != "failed"]


def measure(options: argparse.Namespace, rows: Sequence[Row], console: Console) -> dict[str, Any]:
    """Every row that is not there yet, as long as the minutes last; the results are written after each."""
    records = kept_from(options.resume)
    device_bytes, begun_s, longest_s = card_bytes(options.device), time.monotonic(), 0.0
    left = [row for row in rows if row.name not in {one["row"] for one in records}]
    for row in left:
        spent_s = time.monotonic() - begun_s
        if options.minutes and spent_s + longest_s > 60 * options.minutes:
            break
        answer = run_row(row, options.device, device_bytes)
        twin = by_twin(row) if options.twin and answer["status"] == "measured" else None
        if isinstance(twin, str):
            answer, twin = {**answer, "twin_refusal": twin}, None
        records.append(record(row, answer, twin))
        console.print(f"{row.name}: {answer['status']} {answer.get('reason', '')}", soft_wrap=True, highlight=False)
        longest_s = max(longest_s, time.monotonic() - begun_s - spent_s)
        save(options, records)
    return save(options, records)


def save(options: argparse.Namespace, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results so far, in the file if there is one."""
    result = {
        "benchmark": "memory_gpu",
        "basis": "measured on a CUDA card" if options.device == "cuda" else "a processor: proves the benchmark only",
        "scale": options.scale,
        "machine": machine() | driver(options.device),
        "num_rows_in_all": len(ROWS),
        "rows": list(records),
        "summary": summary(records),
    }
    for path in {options.output, options.resume} - {None}:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def driver(device: str) -> dict[str, str]:
    """Of the card: driver, CUDA, and GiB in all."""
    if device == "cpu":
        return {}
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        version = "unknown"
    return {"driver": version, "cuda": str(torch.version.cuda), "card_gib": f"{gib(card_bytes(device) or 0):.1f}"}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the rows and what the formulas say, and end")
    parser.add_argument("--rows", nargs="+", default=[], help="only rows whose name holds one of these")
    parser.add_argument("--twin", action="store_true", help="run the memory twin beside each row, on the processor")
    parser.add_argument("--minutes", type=float, help="begin no row that would end later than this")
    parser.add_argument("--resume", type=Path, help="file of results: its rows are kept, new ones are added to it")
    parser.add_argument("--output", type=Path, help="JSON file for the results, with card, driver and versions")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the benchmark itself")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny: models of a toy's width")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    # Twelve columns: where nobody looks, the width of a terminal is no measure.
    console = Console() if sys.stdout.isatty() else Console(width=170)
    rows = chosen(options.rows, options.scale)
    if not rows:
        console.print(f"No row's name holds {' or '.join(options.rows)}. --list names them.")
        return 2
    if options.list:
        list_rows(rows, console)
        return 0
    if options.device == "cuda" and not has_card():
        console.print(NO_CARD)
        return 2
    result = measure(options, rows, console)
    console.print(table(result["rows"]), *sentences(result["summary"]), sep="\n")
    num_left = len(rows) - len({one["row"] for one in result["rows"]} & {row.name for row in rows})
    if num_left:
        console.print(f"{num_left} rows are left. Go on with --resume {options.resume or options.output}.")
    return 0


def has_card() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())

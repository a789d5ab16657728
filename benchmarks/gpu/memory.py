"""How far are the memory formulas, and the twin, from what a CUDA allocator says? 37 rows, 0.5B to 14B, on one card.

A row is a trainer (reward, GRPO, PPO with each kind of critic) with all weights or LoRA, without DeepSpeed or under
ZeRO-1 to 3 (once QLoRA, once native segments): three steps with sequences at their longest, in a process of its own.
Models have random weights; nothing is generated and nothing downloaded. ZeRO rows run rank 0 of N with the real engine
and no peers, so NCCL's buffers are not in. A smaller card is imitated by the most that PyTorch may reserve there. A
row that runs out of memory on it says so, and runs once more with all there is, for its peaks.

    make gpu-memory                                     # again and again, until no row is left
    python -m benchmarks.gpu.memory --list
    python -m benchmarks.gpu.memory --device cpu --scale tiny --rows grpo/full/zero2 --output out.json
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from rich.console import Console

from benchmarks.gpu import runner
from benchmarks.gpu.card import card_bytes
from benchmarks.gpu.memory_report import predict, record, sentences, summary, table
from benchmarks.gpu.memory_rows import ROWS, Row, tiny
from tests.twin.driver import environment, run_apart
from tests.twin.simulation import Simulation, simulation_of
from trl_ext.memory.units import GIB, gib

# A row is up to two runs of its worker.
ROW_LIMIT_S = 420.0
# Beyond the prediction, for a prediction that is too low and for the CUDA context.
ROOM = 1.1


# One row ------------------------------------------------------------------------------------------------------------


def missing(row: Row) -> str:
    """The library that a row needs and this machine has not."""
    needed = ["peft"] * row.job.uses_lora + ["deepspeed"] * (row.job.zero_stage > 0)
    needed += ["bitsandbytes"] * (row.job.method == "qlora")
    return next((name for name in needed if find_spec(name) is None), "")


def why_skipped(row: Row, device_bytes: int | None) -> str:
    """Why a row cannot be measured here; empty if it can."""
    if name := missing(row):
        return f"{name} is not installed."
    if device_bytes is not None and ROOM * predict(row)["reserved"] > device_bytes:
        return f"It needs {gib(predict(row)['reserved']):.1f} GiB (estimated), and there are {gib(device_bytes):.1f}."
    return ""


def run_row(row: Row, device: str, device_bytes: int | None, limit_s: float = ROW_LIMIT_S) -> dict[str, Any]:
    """Measure a row: on the imitated card, and if that is too small without it.

    Args:
        row: The configuration.
        device: "cuda" or "cpu".
        device_bytes: Memory of this machine's card, None without one.
        limit_s: Seconds that it may take.
    """
    if reason := why_skipped(row, device_bytes):
        return {"status": "skipped", "reason": reason}
    begun_s, cap = time.monotonic(), int(row.hardware.fill_gib * GIB)
    if device_bytes is None or cap >= device_bytes:
        return {**ask(row, device, None, limit_s), "fits": None}
    capped = ask(row, device, cap, limit_s)
    if capped["status"] != "oom":
        # With retries the allocator was full, and gave back what it kept to go on.
        return {**capped, "fits": not capped.get("retries") if capped["status"] == "measured" else None}
    again = ask(row, device, None, limit_s - (time.monotonic() - begun_s))
    return {**again, "fits": False, "oom_phase": capped["phase"]}


def ask(row: Row, device: str, cap: int | None, limit_s: float) -> dict[str, Any]:
    """The answer of a worker; `failed` with its last words if there is none."""
    simulation = simulation_of(row.job, row.config, row.num_gpus)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"simulation": asdict(simulation), "device": device, "cap": cap}))
        variables = surroundings(simulation, device) | runner.allocator(row.job)
        return runner.ask(["-m", "benchmarks.gpu.memory_worker", str(task)], limit_s, variables)


def surroundings(simulation: Simulation, device: str) -> dict[str, str]:
    """The worker's variables: the twin's, with the card in sight."""
    variables = environment(simulation)
    if device == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        variables["DS_ACCELERATOR"] = "cuda"
    return variables


def by_twin(row: Row) -> dict[str, int] | str:
    """The twin's bytes by phase, or why it cannot follow."""
    result = run_apart(simulation_of(row.job, row.config, row.num_gpus))
    return result.refusal or {phase: peak.num_bytes for phase, peak in result.peaks.items()}


# All rows -----------------------------------------------------------------------------------------------------------


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


def measured(row: Row, device: str, device_bytes: int | None, with_twin: bool, limit_s: float) -> dict[str, Any]:
    """A row of the JSON: what the card says, the formulas, and the twin if it is asked."""
    answer = runner.checked(run_row(row, device, device_bytes, limit_s), row.job.packing)
    twin = by_twin(row) if with_twin and answer["status"] == "measured" else None
    if isinstance(twin, str):
        answer, twin = {**answer, "twin_refusal": twin}, None
    return record(row, answer, twin)


def main() -> int:
    parser = runner.parser("gpu_memory", __doc__)
    parser.add_argument("--twin", action="store_true", help="run the memory twin beside each row, on the processor")
    options = parser.parse_args()
    # Twelve columns: where nobody looks, the width of a terminal is no measure.
    console = Console() if sys.stdout.isatty() else Console(width=170)
    rows = runner.chosen(ROWS, options.rows)
    rows = [tiny(row) for row in rows] if options.scale == "tiny" else rows
    if options.list and rows:
        list_rows(rows, console)
        return 0
    if (code := runner.begin(options, rows, console)) is not None:
        return code
    report(make_run(rows, options, options.twin).measure(console), console)
    return 0


def make_run(rows: Sequence[Row], options: argparse.Namespace, with_twin: bool = False) -> runner.Run:
    device_bytes = card_bytes(options.device)

    def measure(row: Row, limit_s: float) -> runner.Record:
        return measured(row, options.device, device_bytes, with_twin, limit_s)

    return runner.Run("gpu_memory", rows, options, measure, ROW_LIMIT_S, summary)


def report(result: Mapping[str, Any], console: Console) -> None:
    """Say what came out."""
    console.print(table(result["rows"]), *sentences(result["summary"]), sep="\n")
    runner.say_what_is_left(result, console)


if __name__ == "__main__":
    sys.exit(main())

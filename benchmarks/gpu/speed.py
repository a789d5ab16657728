"""How fast is GRPO on this card? An update, and a whole step with generation, against TRL and Unsloth.

A row is a trainer on a shape, in a process of its own; models have
random weights of Qwen3-8B's shape with as many layers as the card holds and gets through in time (`scale`). The
setting is DualKV's (arXiv 2605.15422), and one with a long tail of lengths. MFU counts tokens that are really needed;
MFU (verl) counts every copy of a prompt, as verl and DualKV do.
Unsloth's rows are skipped where it is not installed.

    make gpu-speed                                      # again and again, until no row is left
    python -m benchmarks.gpu.speed --list
    python -m benchmarks.gpu.speed --device cpu --scale tiny --rows update/tail --output out.json
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import runner
from benchmarks.gpu.beside import beside, card_name, measured_seconds, predict
from benchmarks.gpu.card import card_bytes, card_facts
from benchmarks.gpu.speed_rows import FLASH, OURS, WAYS, Row, has_attention, rows
from trl_ext.memory import find_shape, parse_gpus
from trl_ext.memory.units import gib

ROW_LIMIT_S = 240.0


def run_row(row: Row, device: str, limit_s: float) -> dict[str, Any]:
    """Measure a row within its seconds."""
    about = {"scale": row.scale, "layers": row.config["num_hidden_layers"], "shape": asdict(row.shape)}
    about |= {"published": row.published} if row.published else {}
    if lacking := [name for name in row.needs if not is_here(name)]:
        return {"status": "skipped", "reason": f"{lacking[0]} is not installed.", **about}
    if row.uses_vllm and device == "cpu":
        return {"status": "skipped", "reason": "vLLM for processors takes no weights from TRL.", **about}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"row": asdict(row), "device": device}))
        variables = os.environ | runner.allocator(row.job)
        found = runner.ask(["-m", "benchmarks.gpu.speed_worker", str(task)], limit_s, variables)
    found = runner.checked(found, row.job.packing)
    is_asked = not row.attention or found.get("kernels", "").startswith(f"attention: {row.attention}")
    if found["status"] == "measured" and not is_asked:
        reason = f"Its kernels were not of {row.attention}: {found['kernels']}."
        found = {"status": "failed", "reason": reason}
    return {**found, **about, **(held(row, found) if found["status"] == "measured" else {})}


def is_here(package: str) -> bool:
    """Whether a library, or a package of FLASH, is installed."""
    flash = [name for name, distribution in FLASH.items() if distribution == package]
    return has_attention(flash[0]) if flash else find_spec(package) is not None


def held(row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner answers beside what was measured."""
    hardware = parse_gpus(f"1x{card_name()}", gib(card_bytes("cuda") or 0) if runner.has_card() else None)
    generates = row.generates or row.uses_vllm
    measured = {kind: found[kind] for kind in ("allocated", "reserved")}
    measured["seconds"] = measured_seconds(found["phases"], generates=generates)
    predicted = predict(find_shape(row.config), row.job, hardware, generates=generates, timed=row.timed_job)
    return beside(predicted, measured)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many times faster ours is than each other library, by shape: of the whole step, and of its update.

    `faster_by`: how many times faster ours is by each of WAYS than by its defaults.
    """
    found = {one["row"]: one for one in records if one["status"] == "measured"}
    faster: dict[str, dict[str, float]] = {}
    by_way: dict[str, dict[str, float]] = {}
    for name, one in found.items():
        kind, _, library = name.rpartition("/")
        base, _, way = kind.rpartition("-")
        if library != OURS and f"{kind}/{OURS}" in found:
            faster[name] = _times(one, found[f"{kind}/{OURS}"])
        elif way in WAYS and f"{base}/{OURS}" in found:
            by_way[name] = _times(found[f"{base}/{OURS}"], one)
    return {"faster_than": faster} | ({"faster_by": by_way} if by_way else {})


def _times(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> dict[str, float]:
    phases = slow["phases"]["update"] / fast["phases"]["update"]
    return {"step": round(slow["step_s"] / fast["step_s"], 2), "update": round(phases, 2)}


def table(result: Mapping[str, Any]) -> Table:
    """A line a row."""
    shown = Table(title="GRPO on a card: seconds of a step")
    columns = ("row", "scale", "step s", "generate", "update", "planned", "tokens/s", "MFU", "MFU (verl)", "peak GiB")
    for column in (*columns, "planned", "ours faster"):
        shown.add_column(column, justify="left" if column in ("row", "scale") else "right")
    for one in result["rows"]:
        if one["status"] != "measured":
            shown.add_row(one["row"], one.get("scale", ""), one["status"])
            continue
        shares = ("" if one.get(name) is None else f"{one[name]:.0%}" for name in ("mfu", "mfu_verl"))
        seconds, planned = one["predicted"]["seconds"].get("update"), one["predicted"]["allocated"]
        peaks = (f"{gib(num_bytes):.2f}" if num_bytes else "" for num_bytes in (one["allocated"], planned))
        planned_s = "" if seconds is None else round(seconds, 3)
        values = (one["step_s"], one["phases"]["generate"], one["phases"]["update"], planned_s)
        values += (one.get("tokens_per_s", ""), *shares, *peaks)
        ratio = result["summary"]["faster_than"].get(one["row"], {}).get("step", "")
        shown.add_row(one["row"], one["scale"], *map(str, values), str(ratio))
    return shown


def main() -> int:
    options = runner.parser("gpu_speed", __doc__).parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    device = "cpu" if options.device == "cpu" or not runner.has_card() else "cuda"
    peak = card_facts(device).get("peak_bf16_tflops")
    wanted = runner.chosen(rows(options.scale, card_bytes(device), peak), options.rows)
    if (code := runner.begin(options, wanted, console)) is not None:
        return code
    run = runner.Run(
        "gpu_speed", wanted, options, lambda row, limit_s: run_row(row, device, limit_s), ROW_LIMIT_S, summary
    )
    result = run.measure(console)
    console.print(table(result))
    runner.say_what_is_left(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the card's time goes: the kernels of one step of ours by group, and how long the card waits for the host.

Rows are the speed benchmark's. A kernel belongs to the first group that its name fits, or an operation's name
around it, forward or backward. What the profiler itself costs the host is in the card's idle time.

    python -m benchmarks.gpu.prof
    python -m benchmarks.gpu.prof --device cpu --scale tiny --rows update/tail --output out.json
"""

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, TrainerCallback

from benchmarks.gpu import part
from benchmarks.gpu.card import card_bytes, card_facts
from benchmarks.gpu.speed_rows import OURS, rows
from benchmarks.gpu.speed_worker import make_trainer
from benchmarks.grpo_task import PhasesOfSteps, wait

NAMES = ("prof/update/dualkv", "prof/update/dualkv-all", "prof/update/tail", "prof/peers/trl-1.7B")
# The last has norms, rotary positions, activations, and what else is computed value by value.
GROUPS = {
    "optimizer": r"Optimizer\.step|adam|foreach",
    "head": r"LogProb|log_softmax|logsumexp|cross_entropy",
    "attention": r"flash|fmha|attention|varlen|_ShortRun|_Merged",
    "gemm": r"gemm|nvjet|cutlass|::mm\b|::addmm\b|::bmm\b|::linear\b|::matmul\b",
    "copies": r"memcpy|memset|copy_|index|gather|::cat\b|fill_|zero_|CatArray",
    "elementwise": "",
}


class SecondStep(TrainerCallback):
    """Profiles the step after the one that warms up; `figures` has what `shares` makes of it."""

    def __init__(self, device: str):
        self._profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda"))
        self.figures: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._profile.start()
            wait()
            self._begun_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            wait()
            wall_s = time.perf_counter() - self._begun_s
            self._profile.stop()
            self.figures = shares(self._profile.events() or [], wall_s)


def shares(events: Iterable[Any], wall_s: float) -> dict[str, Any]:
    """Of a step of so many seconds: kernels, share of each group, and the share in which no kernel ran.

    On a processor operations stand for kernels. `unknown` are kernels that no operation started.
    """
    real = [event for event in events if not event.is_user_annotation]
    host = [event for event in real if event.device_type == DeviceType.CPU]
    card = [event for event in real if event.device_type != DeviceType.CPU]
    spent: Counter[str] = Counter()
    for event in host:
        for kernel in event.kernels:
            spent[group_of(event, kernel.name)] += kernel.duration
        if not card:
            spent[group_of(event)] += event.self_cpu_time_total
    busy_us = end_us = 0.0
    for run in sorted((event.time_range for event in card or host), key=lambda run: run.start):
        busy_us += max(0.0, run.end - max(run.start, end_us))
        end_us = max(end_us, run.end)
    if card:
        spent["unknown"] = max(0.0, sum(run.time_range.end - run.time_range.start for run in card) - spent.total())
    found = {group: round(us / 1e6 / wall_s, 4) for group, us in spent.most_common()}
    idle = round(max(0.0, 1 - busy_us / 1e6 / wall_s), 4)
    listed = ", ".join(f"{group} {share:.0%}" for group, share in found.items())
    told = {"says": f"a step of {wall_s:.2f} s: {listed}; idle {idle:.0%}"}
    return {"wall_s": round(wall_s, 4), "kernels": len(card or host), "share": found, "idle_share": idle, **told}


def group_of(event: Any, kernel: str = "") -> str:
    """The group of a kernel, by its name and the names of the operations around it."""
    names = [kernel]
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    text = " | ".join(names)
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, text, re.IGNORECASE))


def work(name: str, device: str, scale: str) -> dict[str, Any]:
    peak = card_facts(device).get("peak_bf16_tflops")
    of_speed = f"{name.removeprefix('prof/')}/{OURS}"
    row = next(row for row in rows(scale, card_bytes(device), peak) if row.name == of_speed)
    step = SecondStep(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(row, device, folder, PhasesOfSteps())
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(step)
        trainer.train()
    return {**step.figures, "scale": row.scale}


if __name__ == "__main__":
    sys.exit(part.main("prof", __doc__, NAMES, work))

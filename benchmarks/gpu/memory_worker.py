"""One row of the memory benchmark, in a process of its own: three worst-case steps, and what the allocator says.

The trainer, its arguments and data are the memory twin's, on real tensors: random weights made on the device,
completions given at their longest. With DeepSpeed the real engine runs as rank 0 of N in a process group that is a
fake: what it gathers are copies of its own share, so that values mean nothing and bytes are true. NCCL is not there.

    python -m benchmarks.gpu.memory_worker TASK.json

The last line printed is the answer: `allocated` and `reserved`, bytes by phase, and `status`: "measured" or "oom".
"""

import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback

import trl_ext
from benchmarks.gpu.runner import answer
from tests.twin import adapters, run, stand_ins
from tests.twin.simulation import Simulation
from tests.twin.tracker import LOAD, UPDATE, Tracker
from trl_ext.compat.versions import installed_versions
from trl_ext.trainers.fit.rehearsal.state import trained_models

# No rehearsal, whose peak is no phase's, and no second try with less after an out-of-memory error.
UNASSISTED = {"memory_rehearsal": False, "memory_on_oom": "raise"}
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is asked.

    Args:
        simulation: The run.
        device: "cuda" or "cpu".
        cap: Bytes that PyTorch may reserve, as on a smaller card; None for all there are.
    """

    simulation: Simulation
    device: str
    cap: int | None = None

    @classmethod
    def load(cls, path: Path) -> "Task":
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values | {"simulation": Simulation(**values["simulation"])})


# Meters: a stack of phases, as the twin's tracker has ---------------------------------------------------------------


class CudaMeter:
    """The allocator's peaks by phase: read and forgotten whenever a phase begins or ends.

    Attributes:
        broke_in: The innermost phase that an exception left; None if none did.
    """

    def __init__(self) -> None:
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.broke_in: str | None = None
        self._phases = [LOAD]

    def read(self) -> None:
        """Charge the peak since the last reading to the phase that is on."""
        phase = self._phases[-1]
        for kept, peak in (
            (self.allocated, torch.cuda.max_memory_allocated()),
            (self.reserved, torch.cuda.max_memory_reserved()),
        ):
            kept[phase] = max(kept.get(phase, 0), peak)
        torch.cuda.reset_peak_memory_stats()
        # Phases are closed on an exception's way out, too, the innermost first.
        if self.broke_in is None and sys.exc_info()[0] is not None:
            self.broke_in = phase

    def open_phase(self, name: str) -> None:
        self.read()
        self._phases.append(name)

    def close_phase(self) -> None:
        self.read()
        self._phases.pop()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.open_phase(name)
        try:
            yield
        finally:
            self.close_phase()

    def begin_training(self) -> None:
        """What no phase claims belongs to the update from here on."""
        self.read()
        self._phases[0] = UPDATE

    def name_modules(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Only the twin says where."""

    def __enter__(self) -> "CudaMeter":
        return self

    def __exit__(self, *error: Any) -> None:
        self.read()

    def answer(self) -> dict[str, Any]:
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return {"allocated": self.allocated, "reserved": self.reserved, "retries": retries}


class LiveMeter(Tracker):
    """The same on a processor, where no allocator keeps an account: the twin's tracker, on real tensors."""

    broke_in = None

    def answer(self) -> dict[str, Any]:
        return {"allocated": {name: peak.num_bytes for name, peak in self.peaks.items()}, "reserved": None}


# The run ------------------------------------------------------------------------------------------------------------


class Updates(TrainerCallback):
    """Ends a run in which an optimizer (of so many) has no state after a step: DeepSpeed skips some silently."""

    def __init__(self, num_optimizers: int) -> None:
        self._num = num_optimizers
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        register_optimizer_step_post_hook(lambda each, *_: self._stepped.setdefault(id(each), each) and None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stepped.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        num = sum(any(each.state.values()) for each in self._stepped.values())
        if num < self._num:
            raise RuntimeError(f"Step {state.global_step}: {num} of {self._num} optimizers have a state after it")


def refuse_idle(log_history: list[dict[str, Any]]) -> None:
    """RuntimeError where rows were left out of an update, as those without advantage are: its peaks are of others."""
    if idle := max(entry.get("packing/skipped_rows_frac", 0.0) for entry in log_history):
        raise RuntimeError(f"{idle:.0%} of the rows of a step were not trained")


@contextlib.contextmanager
def models_on(device: str, in_4_bits: bool) -> Iterator[None]:
    """Weights are made where they are trained: in host memory 14 billion of them take minutes."""
    made = stand_ins._made

    def make(*what: Any) -> Any:
        with torch.device(device):
            model = made(*what)
        if not in_4_bits:
            return model
        # What is loaded is quantised, and nothing else.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            kind, model = type(model), None
            return load_in_4_bits(kind, folder, device)

    with adapters.replaced(("tests.twin.stand_ins:_made", make)):
        yield


def load_in_4_bits(kind: Any, folder: str, device: str) -> Any:
    """The model of a folder as our scripts load it for QLoRA."""
    from transformers import BitsAndBytesConfig

    bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **bits)
    model = kind.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": device})
    return model.eval()


@contextlib.contextmanager
def surroundings(task: Task, meter: Any) -> Iterator[None]:
    """Of the twin's adapters those that a pretended world needs, and who tells of optimizer steps."""
    simulation = task.simulation
    needed = [
        run.silence(),
        adapters.reference_from_config(lambda: stand_ins.causal_model(simulation)),
        run.optimizer_steps(meter),
        models_on(task.device, in_4_bits=bool(simulation.adapter.get("quantised"))),
    ]
    if simulation.deepspeed:
        needed += [
            adapters.objects_from_this_rank(),
            adapters.gathers_of_any_shape(),
            adapters.ranks_that_agree(),
            adapters.engine_steps(lambda: meter.open_phase(run.STEP), meter.close_phase),
        ]
    with contextlib.ExitStack() as stack:
        for each in needed:
            stack.enter_context(each)
        yield


def train(task: Task, meter: Any) -> dict[str, Any]:
    """Three steps; how long they took and what ran."""
    begun_s = time.perf_counter()
    simulation = task.simulation
    if simulation.deepspeed:
        run.start_world(simulation.num_gpus)
    with tempfile.TemporaryDirectory() as folder, surroundings(task, meter), meter:
        arguments = run.make_arguments(simulation, folder, use_cpu=task.device == "cpu", **UNASSISTED)
        adapter = {name: value for name, value in simulation.adapter.items() if name != "quantised"}
        trainer = run.make_trainer(replace(simulation, adapter=adapter), arguments)
        drop_other_meters(trainer)
        run.follow(trainer, meter)
        trainer.add_callback(Updates(len(trained_models(trainer))))
        trainer.train()
    refuse_idle(trainer.state.log_history)
    packages = PACKAGES + (("deepspeed",) if simulation.deepspeed else ())
    return {
        "packed": bool(trainer._packs),
        "step_phases": step_phases(trainer),
        **run.count_parameters(trainer),
        "seconds": round(time.perf_counter() - begun_s, 1),
        "versions": installed_versions(*packages),
    }


def step_phases(trainer: Any) -> dict[str, float]:
    """Seconds of the last step by phase of the trainer's clock."""
    logged = next(entry for entry in reversed(trainer.state.log_history) if "phase/update_s" in entry)
    return {name[len("phase/") : -len("_s")]: took for name, took in logged.items() if name.startswith("phase/")}


def drop_other_meters(trainer: Any) -> None:
    """The trainers' own audit resets the allocator's peaks, which a row reads."""
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "MemoryWatch":
            trainer.remove_callback(callback)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the allocator is behind this exception: our trainers tell it in a sentence of theirs."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, trl_ext.errors.OutOfMemoryError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def work(task: Task) -> dict[str, Any]:
    """Measure a row, or say in which phase it ran out of memory. Any other error ends the process."""
    if task.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(task.cap / total)
    meter = CudaMeter() if task.device == "cuda" else LiveMeter()
    try:
        facts = train(task, meter)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "phase": meter.broke_in, "reason": f"out of memory in {meter.broke_in}"}
    return {"status": "measured", **facts, **meter.answer()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    answer(work(Task.load(Path(sys.argv[1]))))

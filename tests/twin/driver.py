"""Starts a simulation in a process of its own and reads its answer. Light: torch is imported by that process only."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.twin.simulation import Simulation, simulation_of, why_not
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.units import gib

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
PREFIX = "TWIN "  # before the JSON: libraries print, too


@dataclass(frozen=True, slots=True)
class TwinPeak:
    """The most bytes that tensors held at once in a phase.

    Args:
        num_bytes: Allocated bytes.
        op: Operation that asked for the last of them.
        module: Name of the module that ran the operation.
    """

    num_bytes: int
    op: str
    module: str


@dataclass(frozen=True, slots=True)
class TwinResult:
    """What a simulation counted.

    Args:
        peaks: The peak of each phase: "load", "score", "update", "step".
        num_params, num_trained: Parameters of the policy; trained parameters of all models.
        packed: True if forwards were flat rows without padding.
        seconds: Time that the simulation took.
        versions: Versions of the packages that ran.
        refusal: Why the twin could not follow, as a sentence; then there are no peaks, and formulas must answer.
    """

    peaks: Mapping[str, TwinPeak]
    num_params: int = 0
    num_trained: int = 0
    packed: bool = False
    seconds: float = 0.0
    versions: Mapping[str, str] | None = None
    refusal: str = ""

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes of the worst phase; loading, in part in host memory, is left out."""
        return max((peak.num_bytes for phase, peak in self.peaks.items() if phase != "load"), default=0)

    @property
    def peak_gib(self) -> float:
        return gib(self.peak_bytes)


def simulate(
    job: Job, model: Mapping[str, Any] | ModelShape, num_gpus: int, timeout_s: float = TIMEOUT_S
) -> TwinResult:
    """Run the job's trainer on fake tensors, in a process of its own.

    Args:
        job: A planned job.
        model: Its model's config.json, or the shape of a dense one.
        num_gpus: Ranks; rank 0 is simulated.
        timeout_s: After which the twin gives up.
    """
    return run_apart(simulation_of(job, model, num_gpus), timeout_s)


def run_apart(simulation: Simulation, timeout_s: float = TIMEOUT_S) -> TwinResult:
    """Run a simulation in a process of its own."""
    if sentence := why_not(simulation):
        return TwinResult({}, refusal=sentence)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(asdict(simulation)), encoding="utf-8")
        command = [sys.executable, "-m", "tests.twin.run", str(file)]
        try:
            how = {"env": environment(simulation), "cwd": ROOT, "timeout": timeout_s}
            process = subprocess.run(command, capture_output=True, text=True, check=False, **how)
        except subprocess.TimeoutExpired:
            return TwinResult({}, refusal=f"The twin took more than {timeout_s:.0f} s.")
    return read_answer(process.stdout, process.stderr)


def environment(simulation: Simulation | None) -> dict[str, str]:
    """Environment variables of the simulating process: no GPU, no network, and DeepSpeed's place as rank 0."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        variables.pop(name, None)
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if simulation is not None and simulation.deepspeed:
        world = str(simulation.num_gpus)
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        # Nobody connects: the process group is a fake. DeepSpeed wants to read them.
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}
    return variables


def read_answer(output: str, errors: str) -> TwinResult:
    """The result in what the process has printed; a refusal with its last words if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if not lines:
        return TwinResult({}, refusal=f"The twin cannot follow this run: {last_words(errors)}.")
    answer = json.loads(lines[-1].removeprefix(PREFIX))
    peaks = {phase: TwinPeak(**peak) for phase, peak in answer.pop("peaks").items()}
    return TwinResult(peaks, **answer)


def last_words(errors: str) -> str:
    """What stopped a process, with the place if the exception does not say more than its name."""
    lines = [line.removeprefix("[rank0]:").strip() for line in errors.splitlines()]
    lines = [line for line in lines if line] or ["it gave no answer"]
    places = [line for line in lines if line.startswith("File ")]
    said = lines[-1].rstrip(".")
    return f"{said}, {places[-1]}" if places and " " not in said else said

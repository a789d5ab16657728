"""Starts a simulation in a process of its own and reads its answer. Light: torch is imported by that process only."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.twin.simulation import Simulation, why_not

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
        packed: True if forwards were flat rows without padding.
        refusal: Why the twin could not follow, as a sentence; then there are no peaks, and formulas must answer.
    """

    peaks: Mapping[str, TwinPeak]
    packed: bool = False
    refusal: str = ""

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes of the worst phase; loading, in part in host memory, is left out."""
        return max((peak.num_bytes for phase, peak in self.peaks.items() if phase != "load"), default=0)


def run_apart(simulation: Simulation) -> TwinResult:
    """Run a simulation in a process of its own."""
    if sentence := why_not(simulation):
        return TwinResult({}, refusal=sentence)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(asdict(simulation)), encoding="utf-8")
        command = [sys.executable, "-m", "tests.twin.run", str(file)]
        try:
            how = {"env": environment(simulation), "cwd": ROOT, "timeout": TIMEOUT_S}
            process = subprocess.run(command, capture_output=True, text=True, check=False, **how)
        except subprocess.TimeoutExpired:
            return TwinResult({}, refusal=f"The twin took more than {TIMEOUT_S:.0f} s.")
    return read_answer(process.stdout, process.stderr)


def environment(simulation: Simulation) -> dict[str, str]:
    """Environment variables of the simulating process: no GPU, no network, and DeepSpeed's place as rank 0."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        variables.pop(name, None)
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if simulation.deepspeed:
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

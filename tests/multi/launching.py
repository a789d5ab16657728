"""Start a job as one process or under a launch file that we ship, and read its facts and files."""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.multi.warm import warm_python

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
GATHER_OF_CARDS = PROGRAMS / "gather_of_cards.py"
YAMLS = {path.stem: path for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
JSONS = {path.stem: path for path in sorted((ROOT / "deepspeed_configs").glob("*.json"))}
TIMEOUT_S = 900  # of a run that hangs; one that compiles first takes 60 on an idle machine
PATIENCE_S = 300  # of a run that is to end

ENVIRONMENT = os.environ | {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@dataclass(frozen=True)
class Run:
    """The results of a finished job: the facts of each process, and the folder with its files."""

    ranks: list
    folder: Path

    @property
    def facts(self) -> Any:
        return self.ranks[0]

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """All that was trained and saved, a critic included."""
        files = [*self.folder.glob("*.safetensors"), *self.folder.glob("critic/*.safetensors")]
        of_file = {file: f"{file.parent.relative_to(self.folder)}/".removeprefix("./") for file in files}
        return {prefix + name: w for file, prefix in of_file.items() for name, w in loaded(file).items()}

    def part(self, name: str) -> "Run":
        """One of several runs that the job made, in folders of their names."""
        return Run([said[name] for said in self.ranks], self.folder / name)

    def distance(self, other: "Run") -> float:
        return distance(self.weights, other.weights)


def distance(weights: dict, others: dict) -> float:
    """The largest difference of any two weights that belong together."""
    assert weights.keys() == others.keys() and weights
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def run_job(job: str, launch: str | None, folder: Path, num_processes: int = 2, **options: Any) -> Run:
    """Run a job of `worker.py` to its end, under a launch file, or, without one, as a plain process."""
    succeeded(job_command(job, launch, folder, num_processes, **options))
    return Run(torch.load(folder / "facts.pt"), folder)


def job_command(job: str, launch: str | None, folder: Path, num_processes: int = 2, **options: Any) -> list:
    command = launched(launch, num_processes) if launch else [warm_python()]
    return [*command, "-m", "tests.multi.worker", job, folder, json.dumps(options, default=str)]


def succeeded(command, folder: Path = ROOT, **variables: Any) -> subprocess.CompletedProcess:
    """Run a command to its end, or fail with the tail of what it said."""
    done = ended(command, folder, **variables)
    if done.returncode != 0:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        pytest.fail(f"exit code {done.returncode} from {' '.join(done.args)}\n{said}", pytrace=False)
    return done


def ended(command, folder: Path = ROOT, **variables: Any) -> subprocess.CompletedProcess:
    """Run a command to its end in a folder; `variables` are added to the environment of every launch."""
    env = environment() | {name: str(value) for name, value in variables.items()}
    command = [str(word) for word in command]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


class Started:
    """A command that runs in its own session; what it says goes into a file."""

    def __init__(self, command, log: Path):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, is_so) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.05)

    def code(self) -> int:
        code = self.process.wait(PATIENCE_S)
        print(self.text[-6000:])  # shown where the test fails
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # its own session, started above
            self.process.wait(PATIENCE_S)


def environment() -> dict[str, str]:
    """Of every launch. torch starts the ranks with the Python that `PYTHON_EXEC` names."""
    return ENVIRONMENT | {"PYTHON_EXEC": str(warm_python())}


def loaded(path: Path) -> dict:
    """Weights that a worker saved, all of them in float32."""
    weights = load_file(path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    return weights


def launched(yaml_name: str, num_processes: int) -> list:
    """accelerate's launch, by a Python that is warm. A file for several cards gathers as on cards."""
    # Port 0 lets accelerate choose a free one.
    launcher = [warm_python(), "-m", "accelerate.commands.launch", "--main_process_port", 0]
    for_cards = [str(GATHER_OF_CARDS)] if yaml_name.startswith(("multi_gpu", "zero")) else []
    first = dict.fromkeys([*filter(None, ENVIRONMENT.get("RUN_FIRST", "").split(os.pathsep)), *for_cards])
    variables = ["env", f"RUN_FIRST={os.pathsep.join(first)}"] if first else []
    return [*variables, *launcher, "--num_processes", num_processes, "--config_file", YAMLS[yaml_name]]


def skip_what_cannot_run(name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    if name.endswith("_offload") and not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("DeepSpeed cannot compile its CPU Adam here: needs c++ and ninja")

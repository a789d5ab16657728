"""Start a worker script as one process or under a launch file that we ship, and read what it left behind."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    """What a finished worker left behind."""

    facts: dict
    weights: dict
    folder: Path

    def distance(self, other: "Run") -> float:
        """The largest difference of any two weights that belong together."""
        assert self.weights.keys() == other.weights.keys()
        return max((self.weights[name] - other.weights[name]).abs().max().item() for name in self.weights)


def run_worker(worker, command, model, output_dir, num_processes, *options, weights="model.safetensors") -> Run:
    """Run the worker to its end, or fail with the tail of its log."""
    facts = facts_of(worker, command, model, output_dir, num_processes, *options)
    return Run(facts, loaded(output_dir / weights), output_dir)


def facts_of(worker, command, model, output_dir, num_processes, *options) -> dict:
    """Run the worker to its end, or fail with the tail of its log; what it says of itself."""
    command = [*command, worker, "--model", model, "--output_dir", output_dir, "--num_processes", num_processes]
    command = list(map(str, [*command, *options]))
    log = output_dir.with_suffix(".log")
    with log.open("w") as file, subprocess.Popen(command, env=environment(), stdout=file, stderr=file) as process:
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # and not kill: the launcher stops its workers when it is asked to end
            locks = sorted(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"))
            code = f"none after {TIMEOUT_S} s (locks of builds: {locks})"
    if code != 0:
        pytest.fail(f"exit code {code} from {' '.join(command)}\n{log.read_text()[-6000:]}", pytrace=False)
    return json.loads((output_dir / "facts.json").read_text())


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
    variables = ["env", f"RUN_FIRST={GATHER_OF_CARDS}"] if yaml_name.startswith(("multi_gpu", "zero")) else []
    return [*variables, *launcher, "--num_processes", num_processes, "--config_file", YAMLS[yaml_name]]


def skip_what_cannot_run(name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    if name.endswith("_offload") and not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("DeepSpeed cannot compile its CPU Adam here: needs c++ and ninja")

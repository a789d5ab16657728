"""Two processes that shard the model with FSDP2 train the same weights as two under DDP, to 1e-6, packed.

On the CPU over gloo, in fp32, on a tiny random Llama. `on_cpu.py` tells how accelerate comes to shard there.
"""

import json
from pathlib import Path

import pytest

from tests.multi.launching import PROGRAMS, Run, facts_of, launched, loaded
from tests.multi.warm import warm_python

HERE = Path(__file__).parent
TOLERANCE = 1e-6
# Options of the worker, and the files with what it trained.
JOBS = {
    "grpo": ("zero_worker", ["--packing"], "model.safetensors"),
    "reward": ("reward_worker", ["--steps", 3], "model.safetensors"),
    "ppo": ("ppo_worker", ["--packing", "--critics", "head"], "head/model.safetensors"),
    "ppo_adapter": ("ppo_worker", ["--packing", "--critics", "adapter"], "adapter/**/adapter_model.safetensors"),
}


def run_of(job, launcher, models, folder, monkeypatch=None, *options) -> Run:
    name, own, weights = JOBS[job]
    model, reward_model = models
    command = [*launcher, HERE / "on_cpu.py"] if monkeypatch else launcher
    options = [*own, *options, *(["--reward_model", reward_model] if job.startswith("ppo") else [])]
    if monkeypatch:
        monkeypatch.setitem(facts_of.__globals__["ENVIRONMENT"], "SHARDED", str(folder / "sharded.json"))
    out = folder / "out"
    model = reward_model if job == "reward" else model
    facts = facts_of(PROGRAMS / f"{name}.py", command, model, out, 2, *options)
    files = out.glob(weights)
    return Run(facts, {f"{file.parent.name} {name}": w for file in files for name, w in loaded(file).items()}, out)


def sharding() -> list:
    """accelerate's launch of two processes with FSDP2, by a Python that is warm."""
    launcher = [warm_python(), "-m", "accelerate.commands.launch", "--main_process_port", 0, "--num_processes", 2]
    return [*launcher, "--config_file", HERE / "fsdp2.yaml"]


@pytest.mark.parametrize("job", JOBS)
def test_sharded_processes_train_what_whole_ones_do(job, tiny_model, tiny_reward_model, tmp_path, monkeypatch):
    models = tiny_model, tiny_reward_model
    (tmp_path / "ddp").mkdir()
    whole = run_of(job, launched("cpu", 2), models, tmp_path / "ddp")
    sharded = run_of(job, sharding(), models, tmp_path, monkeypatch)
    shares = json.loads((tmp_path / "sharded.json").read_text())
    assert shares.count(0.5) > 15  # a head with one row lies on one process
    print(f"largest weight difference: {sharded.distance(whole):.1e}")  # pytest -rP shows it
    assert sharded.distance(whole) <= TOLERANCE


def test_ppo_is_sharded_by_its_settings_as_by_its_launch(tiny_model, tiny_reward_model, tmp_path, monkeypatch):
    models = tiny_model, tiny_reward_model
    (tmp_path / "ddp").mkdir()
    whole = run_of("ppo", launched("cpu", 2), models, tmp_path / "ddp")
    sharded = run_of("ppo", launched("cpu", 2), models, tmp_path, monkeypatch, "--fsdp")
    assert json.loads((tmp_path / "sharded.json").read_text()).count(0.5) > 15
    assert sharded.distance(whole) <= TOLERANCE

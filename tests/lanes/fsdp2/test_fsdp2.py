"""Two processes that shard the model with FSDP2 train the same weights as two under DDP, to 1e-6, packed.

On the CPU over gloo, in fp32, on a tiny random Llama. `fsdp_on_cpu.py` describes how accelerate comes to shard there.
"""

import json
import shutil

import pytest

from tests.multi.launching import ENVIRONMENT, PROGRAMS, Run, run_job
from tests.multi.trainers.test_fsdp2 import run_of as run_printed
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.formulas.peak import Setup, resident
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape

TOLERANCE = 1e-6
# The job, its options, and the folder of what it trained.
JOBS = {
    "grpo": ("grpo", {"packing": True}, ""),
    "reward": ("reward", {"steps": 3}, ""),
    "ppo": ("ppo", {"packing": True, "critics": ["head"]}, "head"),
    "ppo_adapter": ("ppo", {"packing": True, "critics": ["adapter"]}, "adapter"),
}


def run_of(job, launch, models, folder, **options) -> Run:
    name, own, part = JOBS[job]
    run = run_job(name, launch, folder / "out", model=models[job == "reward"], **own, **options)
    return run.part(part) if part else run


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """A call after which launches shard on the CPU; it returns the file with what lies on process 0."""

    def begin():
        monkeypatch.setitem(ENVIRONMENT, "RUN_FIRST", str(PROGRAMS / "fsdp_on_cpu.py"))
        monkeypatch.setitem(ENVIRONMENT, "SHARDED", str(tmp_path / "sharded.json"))
        return tmp_path / "sharded.json"

    return begin


@pytest.mark.parametrize("launch", ["fsdp2", "fsdp2_offload"])
@pytest.mark.parametrize("job", JOBS)
def test_sharded_processes_train_what_whole_ones_do(job, launch, tiny_model, tiny_reward_model, tmp_path, on_cpu):
    models = tiny_model, tiny_reward_model
    whole = run_of(job, "cpu", models, tmp_path / "ddp")
    facts = on_cpu()
    sharded = run_of(job, launch, models, tmp_path)
    shares = json.loads(facts.read_text())["shares"]
    assert shares.count(0.5) > 15  # a head with one row lies on one process
    print(f"largest weight difference: {sharded.distance(whole):.1e}")  # pytest -rP shows it
    assert sharded.distance(whole) <= TOLERANCE


def test_a_process_holds_the_bytes_that_are_planned(tiny_model, tmp_path, on_cpu):
    """Mixed precision: weights, gradients and Adam's state are fp32 where they are split."""
    facts = on_cpu()
    run_printed("fsdp2", tiny_model, tmp_path / "run", {"bf16": True, "dtype": "bfloat16"})
    held = json.loads(facts.read_text())
    job = Job("grpo", zero_stage=3, fsdp=True, global_batch=16, num_generations=4)
    planned = resident(Setup.of(find_shape(str(tiny_model)), job, parse_gpus("2xA100-40GB")))
    for term in ("policy weights", "gradients", "optimizer"):
        assert held[term] == pytest.approx(planned[term], rel=1e-3), term


def test_a_resumed_run_ends_as_one_that_was_left_alone(tiny_model, tmp_path, on_cpu):
    on_cpu()
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run_printed("fsdp2", tiny_model, tmp_path, settings)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "model.safetensors").unlink()
    resumed = run_printed("fsdp2", tiny_model, tmp_path, settings | {"resume_from_checkpoint": True})
    assert "2/4" not in (tmp_path / "log").read_text()
    assert resumed.distance(whole) == 0


def test_ppo_is_sharded_by_its_settings_as_by_its_launch(tiny_model, tiny_reward_model, tmp_path, on_cpu):
    models = tiny_model, tiny_reward_model
    whole = run_of("ppo", "cpu", models, tmp_path / "ddp")
    facts = on_cpu()
    sharded = run_of("ppo", "cpu", models, tmp_path, fsdp=True)
    assert json.loads(facts.read_text())["shares"].count(0.5) > 15
    assert sharded.distance(whole) <= TOLERANCE

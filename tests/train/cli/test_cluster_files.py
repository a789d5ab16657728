"""The files of docs/cluster: their fields are known, their scripts start what trl-ext accepts, and requeue or end."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from trl_ext.launch.accelerate import launch_arguments
from trl_ext.scripts import grpo

CLUSTER = ROOT / "docs" / "cluster"
DIRECTIVES = set(
    "job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem time signal requeue open-mode output".split()
)
# Programs of the schedulers, and ours: each writes down how it was called. srun is once a node. A run ends when the
# server beside it has written its call, which a busy machine may take longer for.
STAND_INS = {
    "trl-ext": 'until [ -z "$SERVES" ] || grep -q \'^."trl"\' "$CALLS"; do /bin/sleep 0.1; done\nexit ${CODE:-0}',
    "trl": "trap 'exit 0' TERM; while :; do sleep 0.1; done",
    "srun": (
        'tasks=2\nfor word; do case "$word" in --ntasks=1) tasks=1;; --*) ;; *) break;; esac; shift; done\n'
        "export SLURM_STEP_NUM_NODES=$tasks SLURM_STEP_NUM_TASKS=$tasks SLURM_NODEID=0\n"
        "export SLURM_STEP_NODELIST=gpu[1-2]\n"
        'exec "$@"'
    ),
    "scontrol": '[ "$1" != show ] || printf "gpu0\\ngpu1\\n"',
    "sleep": "exec /bin/sleep 0.1",
}
RECORD = """#!/bin/bash
{python} - "$0" "$@" <<'END' >> {calls}
import json, os, sys
slurm = {{k: v for k, v in os.environ.items() if k.startswith("SLURM_STEP") or k == "SLURM_NODEID"}}
print(json.dumps([os.path.basename(sys.argv[1]), *sys.argv[2:], slurm]))
END
{then}
"""


@pytest.fixture
def shell(tmp_path):
    """Runs a script with stand-ins of all programs; returns its exit code and the calls, in order of their names."""
    calls, shared = tmp_path / "calls", tmp_path / "shared"
    (tmp_path / "bin").mkdir()
    shared.mkdir()
    (shared / "recipe.yaml").write_text("rules: [{rule: length, high: 4, slack: 4}]\n")
    for name, then in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(RECORD.format(python=sys.executable, calls=calls, then=then))
        program.chmod(0o755)

    def run(script: str, **variables):
        calls.write_text("")
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)} | variables
        script = script.replace("/shared", str(shared))
        code = subprocess.run(["bash", "-c", script], env=environment, timeout=60).returncode
        return code, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def of(program, calls) -> list[list]:
    return [call for call in calls if call[0] == program]


def accepted(call, monkeypatch, tmp_path):
    """What trl-ext makes of a call: it refuses any word that it does not know."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in call[-1].items():
        monkeypatch.setenv(name, value)
    assert call[:2] == ["trl-ext", "grpo"]
    has_saved = any((tmp_path / "shared" / "out").glob("checkpoint-*"))
    assert call[call.index("--resume_from_checkpoint") + 1] == str(has_saved).lower()
    return launch_arguments("trl_ext.scripts.grpo", grpo.make_parser(), call[2:-1])


@pytest.mark.parametrize("name", ["train", "train_vllm"])
@pytest.mark.parametrize(("ends_with", "has_saved"), [(0, True), (1, False), (75, False)])
def test_the_batch_script_starts_a_run_and_requeues_one_that_saved(
    name, ends_with, has_saved, shell, tmp_path, monkeypatch
):
    text = (CLUSTER / f"{name}.sbatch").read_text()
    directives = re.findall(r"^#SBATCH --([\w-]+)(?:=\S+)?$", text, flags=re.MULTILINE)
    assert set(directives) <= DIRECTIVES and len(directives) == text.count("#SBATCH")
    assert "#SBATCH --signal=TERM@600" in text and "#SBATCH --requeue" in text
    serves = name == "train_vllm"
    if has_saved:
        (tmp_path / "shared" / "out" / "checkpoint-3").mkdir(parents=True)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(2 + serves), "SLURM_JOB_NODELIST": "gpu[0-2]"}
    code, calls = shell(text, CODE=str(ends_with), SERVES="yes" * serves, **slurm)
    assert code == ends_with
    (call,) = of("trl-ext", calls)
    arguments = accepted(call, monkeypatch, tmp_path)
    assert (arguments.num_machines, arguments.machine_rank, arguments.num_processes) == (2, 0, 16)
    requeued = [each[1:3] for each in of("scontrol", calls) if each[1] == "requeue"]
    assert requeued == ([["requeue", "7"]] if ends_with == 75 else [])
    if serves:
        assert any("--nodelist=gpu0" in each for each in of("srun", calls))
        assert call[call.index("--vllm_server_host") + 1] == "gpu0"


@pytest.mark.parametrize("name", ["sky", "sky_vllm"])
def test_the_task_of_skypilot_starts_a_run_on_each_node(name, shell, tmp_path, monkeypatch):
    task = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "file_mounts", "workdir", "setup", "envs", "run"}
    nodes = task["num_nodes"]
    sky = {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{number + 1}" for number in range(nodes)),
        "SKYPILOT_TASK_ID": "one",
    }
    for rank in range(2):
        code, calls = shell(task["run"], SKYPILOT_NODE_RANK=str(rank), **sky, **task.get("envs", {}))
        (call,) = of("trl-ext", calls)
        arguments = accepted(call, monkeypatch, tmp_path)
        assert code == 0 and (arguments.num_machines, arguments.machine_rank) == (2, rank)
        assert (arguments.num_processes, arguments.main_process_ip) == (16, "10.0.0.1")
    if nodes == 3:  # the run is over: the server ends, too
        assert call[call.index("--vllm_server_host") + 1] == "10.0.0.3"
        code, calls = shell(task["run"], SKYPILOT_NODE_RANK="2", **sky, **task["envs"])
        assert code == 0 and not of("trl-ext", calls)


@pytest.mark.parametrize("name", ["trainjob", "trainjob_vllm"])
def test_the_train_job_starts_a_run_on_each_pod(name, shell, tmp_path, monkeypatch):
    parts = list(yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text()))
    kinds = {part["kind"]: part for part in parts}
    assert set(kinds) == {"TrainingRuntime", "TrainJob"} | ({"Deployment", "Service"} if "vllm" in name else set())
    runtime, job = kinds["TrainingRuntime"], kinds["TrainJob"]["spec"]
    assert set(job) == {"runtimeRef", "trainer"} and job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert set(job["trainer"]) <= {"numNodes", "resourcesPerNode", "command", "args"}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "grpo-node-0-0.grpo"}
    pet |= {"PET_MASTER_PORT": "29400"}
    code, calls = shell(job["trainer"]["args"][0], **pet)
    arguments = accepted(of("trl-ext", calls)[0], monkeypatch, tmp_path)
    assert code == 0 and (arguments.num_machines, arguments.machine_rank, arguments.num_processes) == (2, 1, 16)
    if "vllm" in name:
        labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert kinds["Service"]["spec"]["selector"] == labels and kinds["Service"]["metadata"]["name"] == "vllm"

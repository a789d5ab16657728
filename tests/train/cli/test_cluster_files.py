"""The files of docs/cluster: their fields are known, their scripts start what trl-ext accepts, and requeue or end.

Their servers are what TRL's parser and the planner take."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from trl.scripts.vllm_serve import make_parser as vllm_parser

from tests.conftest import ROOT
from trl_ext.errors import CANNOT_SAVE
from trl_ext.launch.accelerate import launch_arguments
from trl_ext.memory.planner.planner import plan
from trl_ext.scripts import grpo
from trl_ext.scripts.exit import OUT_OF_MEMORY, USER_ERROR

CLUSTER = ROOT / "docs" / "cluster"
DIRECTIVES = set(
    "job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem time signal requeue open-mode output".split()
)
FILES = sorted(path.name for path in CLUSTER.iterdir() if path.suffix != ".md")
SET = "StatefulSet"
GPUS = 8  # of a machine
# Programs of the schedulers, and ours: each writes down how it was called. srun is once a node. A run ends when the
# servers have written their calls, which a busy machine may take longer for. The file DONE ends servers.
SERVED = '[ "$(grep -c \'^."trl"\' "$CALLS")" -ge "${SERVERS:-0}" ]'
STAND_INS = {
    "trl-ext": f"until {SERVED}; do /bin/sleep 0.1; done\nexit ${{CODE:-0}}",
    "trl": "trap 'exit 0' TERM; while :; do /bin/sleep 0.1; done",
    "srun": (
        'tasks=2\nfor word; do case "$word" in --ntasks=1) tasks=1;; --*) ;; *) break;; esac; shift; done\n'
        "export SLURM_STEP_NUM_NODES=$tasks SLURM_STEP_NUM_TASKS=$tasks SLURM_NODEID=0\n"
        "export SLURM_STEP_NODELIST=gpu[1-2]\n"
        'exec "$@"'
    ),
    "scontrol": '[ "$1" != show ] || printf "gpu0\\ngpu1\\n"',
    "sleep": f'if {SERVED} && [ -n "$DONE" ]; then touch "$DONE"; fi\nexec /bin/sleep 0.1',
}
RECORD = """#!/bin/bash
{python} - "$0" "$@" <<'END' >> {calls}
import json, os, sys
names = [k for k in os.environ if k.startswith("SLURM_STEP") or k in ("SLURM_NODEID", "CUDA_VISIBLE_DEVICES")]
print(json.dumps([os.path.basename(sys.argv[1]), *sys.argv[2:], {{k: os.environ[k] for k in names}}]))
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


def value(call, flag: str) -> str:
    return call[call.index(flag) + 1]


def can_serve(calls, run, cards: list[list[int]]) -> list[int]:
    """Check the servers of a run: TRL takes their words, the planner their numbers; return their ports."""
    words = [call[2:-1] for call in calls]
    parsed = [vllm_parser().parse_args_and_config(each, return_remaining_strings=True) for each in words]
    servers, others = [server for server, _ in parsed], [rest for _, rest in parsed]
    model, size, num = value(run, "--model_name_or_path"), servers[0].tensor_parallel_size, len(servers)
    serving = {"vllm_servers": num, "vllm_tensor_parallel_size": size}
    assert plan("grpo", model, f"{GPUS + num * size}xA100-80GB", zero_stage=2, **serving).plans
    assert plan("grpo", model, f"2x{GPUS}xA100-80GB", zero_stage=2, vllm_mode="server", vllm_servers=0).plans
    # TRL: data parallelism is an error for a dense model. Servers with one seed would draw alike.
    assert {(each.model, each.tensor_parallel_size, each.data_parallel_size) for each in servers} == {(model, size, 1)}
    assert sorted(others) == [["--seed", str(number)] for number in range(num)]
    shared = [card for each in cards for card in each]
    assert [len(each) for each in cards] == [size] * num and len(set(shared)) == len(shared)
    assert set(shared) <= set(range(GPUS))
    return sorted(server.port for server in servers)


def cards_of(calls) -> list[list[int]]:
    """The cards that each server sees on its machine: all, where its call names none."""
    every = ",".join(map(str, range(GPUS)))
    return [[int(card) for card in call[-1].get("CUDA_VISIBLE_DEVICES", every).split(",")] for call in calls]


def asked(run) -> list[str]:
    """The servers that a run asks."""
    return value(run, "--vllm_server_base_url").split(",")


def texts_of(name: str) -> list[str]:
    """The shell texts of a file."""
    text = (CLUSTER / name).read_text()
    if name.endswith(".sbatch"):
        return [text]
    parts = list(yaml.safe_load_all(text))
    if name.startswith("sky"):
        return [parts[0]["setup"], parts[0]["run"]]
    serving = [part["spec"]["template"]["spec"]["containers"][0]["args"][0] for part in parts if part["kind"] == SET]
    return [*serving, *(part["spec"]["trainer"]["args"][0] for part in parts if part["kind"] == "TrainJob")]


@pytest.mark.parametrize("name", FILES)
def test_bash_parses_the_scripts_and_the_file_names_the_extras_that_it_needs(name):
    for text in texts_of(name):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
    text = (CLUSTER / name).read_text()
    extras = ["deepspeed", "vllm"] if "vllm" in name else ["deepspeed"]
    assert "--config_file zero2" in text  # which needs DeepSpeed
    assert re.findall(r"(?:trl_ext|\.)\[([\w,]+)\]", text) == [",".join(extras)]
    assert set(extras) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


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
    (slurm["SLURM_CPUS_PER_TASK"],) = re.findall(r"^#SBATCH --cpus-per-task=(\d+)", text, flags=re.MULTILINE)
    code, calls = shell(text, CODE=str(ends_with), SERVERS=str(2 * serves), **slurm)
    assert code == ends_with
    (call,) = of("trl-ext", calls)
    arguments = accepted(call, monkeypatch, tmp_path)
    assert (arguments.num_machines, arguments.machine_rank, arguments.num_processes) == (2, 0, 16)
    requeued = [each[1:3] for each in of("scontrol", calls) if each[1] == "requeue"]
    assert requeued == ([["requeue", "7"]] if ends_with == 75 else [])
    steps = of("srun", calls)
    assert all(f"--cpus-per-task={slurm['SLURM_CPUS_PER_TASK']}" in each for each in steps)  # srun inherits it no more
    if serves:
        ports = can_serve(of("trl", calls), call, cards_of(of("trl", calls)))
        assert asked(call) == [f"http://gpu0:{port}" for port in ports]
        starting = [each for each in steps if "--nodelist=gpu0" in each]
        assert len(starting) == len(ports) and all("--overlap" in each for each in starting)


def test_servers_outlive_the_run_where_slurm_signals_all_steps(shell, tmp_path):
    pids = tmp_path / "pids"
    serve = f'echo $$ >> {pids}; trap "exit 0" TERM; while :; do /bin/sleep 0.1; done\n'
    # SLURM signals the servers, too, while the run saves.
    train = (
        f"until [ $(cat {pids} | wc -l) -eq 2 ]; do /bin/sleep 0.1; done; kill -TERM $(cat {pids}); /bin/sleep 0.5\n"
    )
    train += f"for one in $(cat {pids}); do kill -0 $one || exit 6; done; exit 75\n"
    pids.touch()
    for name, then in (("trl", serve), ("trl-ext", train)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{then}")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "gpu[0-2]"}
    code, calls = shell((CLUSTER / "train_vllm.sbatch").read_text(), SLURM_CPUS_PER_TASK="64", **slurm)
    assert code == 75 and ["requeue", "7"] in [each[1:3] for each in of("scontrol", calls)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())


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
        sky["SKYPILOT_TASK_ID"] = "two"
        done = str(tmp_path / "shared" / "out-two.done")
        code, calls = shell(task["run"], SKYPILOT_NODE_RANK="2", SERVERS="2", DONE=done, **sky, **task["envs"])
        assert code == 0 and not of("trl-ext", calls)
        ports = can_serve(of("trl", calls), call, cards_of(of("trl", calls)))
        assert asked(call) == [f"http://10.0.0.3:{port}" for port in ports]


@pytest.mark.parametrize("name", ["trainjob", "trainjob_vllm"])
def test_the_train_job_starts_a_run_on_each_pod(name, shell, tmp_path, monkeypatch):
    parts = list(yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text()))
    kinds = {part["kind"]: part for part in parts}
    assert set(kinds) == {"TrainingRuntime", "TrainJob"} | ({SET, "Service"} if "vllm" in name else set())
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
    (call,) = of("trl-ext", calls)
    arguments = accepted(call, monkeypatch, tmp_path)
    assert code == 0 and (arguments.num_machines, arguments.machine_rank, arguments.num_processes) == (2, 1, 16)
    if "vllm" in name:
        servers = kinds[SET]["spec"]
        labels, own = servers["template"]["metadata"]["labels"], servers["template"]["spec"]["containers"][0]
        assert kinds["Service"]["spec"]["selector"] == labels == servers["selector"]["matchLabels"]
        assert kinds["Service"]["metadata"]["name"] == servers["serviceName"] == "vllm"
        numbers, gpus = range(servers["replicas"]), own["resources"]["limits"]["nvidia.com/gpu"]
        begin = f"{own['args'][0].replace('exec ', '').strip()} &\nuntil {SERVED}; do /bin/sleep 0.1; done\nkill $!"
        serving = [of("trl", shell(begin, HOSTNAME=f"vllm-{number}", SERVERS="1")[1])[0] for number in numbers]
        cards = [[number * gpus + card for card in range(gpus)] for number in numbers]
        ports = can_serve(serving, call, cards)
        assert asked(call) == [
            f"http://vllm-{number}.vllm:{port}" for number, port in zip(numbers, ports, strict=True)
        ]


@pytest.mark.parametrize("name", ["trainjob", "trainjob_vllm"])
def test_a_train_job_is_not_started_again_where_that_changes_nothing(name):
    parts = yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text())
    (jobs,) = (part["spec"]["template"]["spec"] for part in parts if part["kind"] == "TrainingRuntime")
    (rule,) = jobs["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = jobs["replicatedJobs"][0]["template"]["spec"]
    pod, (rule,) = job["template"]["spec"], job["podFailurePolicy"]["rules"]
    ends = {"operator": "In", "values": [USER_ERROR, OUT_OF_MEMORY, CANNOT_SAVE]}
    assert rule == {"action": "FailJob", "onExitCodes": {"containerName": pod["containers"][0]["name"], **ends}}
    assert pod["restartPolicy"] == "Never"  # else Kubernetes refuses a podFailurePolicy

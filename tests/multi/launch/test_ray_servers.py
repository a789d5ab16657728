"""`--launcher ray --vllm_servers 2`: servers are actors on GPUs of the cluster; all else is as without Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests import fake_servers
from tests.multi.launch.test_vllm_servers import folder as folder
from tests.multi.launch.test_vllm_servers import servers
from tests.multi.launching import TIMEOUT_S, environment, loaded
from tests.multi.warm import warm_python
from trl_ext.errors import LostProcessError
from trl_ext.launch.ray_servers import serving_on_ray

ray = pytest.importorskip("ray")
a_minute = pytest.mark.nightly
ALONE = ("--num_processes", "1", "--config_file", "cpu", "--main_process_port", "0")
ON_RAY = ("--launcher", "ray", "--num_workers", "1", "--config_file", "cpu", "--max_failures", "1")
SERVED = "tests.multi.programs.served"
ENDLESS = ("--max_steps", "100000")


def settings_of_a_run(folder) -> dict:
    """Of a recipe that trains on the CPU for four steps and saves after each."""
    given = {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "rows.jsonl")}
    given |= {"reward_funcs": ["tests.fake_servers.length"], "max_steps": 4, "num_generations": 2, "use_cpu": True}
    given |= {"per_device_train_batch_size": 4, "max_completion_length": 4, "bf16": False, "learning_rate": 1e-3}
    return given | {"report_to": "none", "save_steps": 1}


@contextmanager
def running(folder, tmp_path, *options, **variables):
    """A run with two servers; all that it started is gone behind the block."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings_of_a_run(folder)))
    words = ["--config", tmp_path / "recipe.yaml", "--output_dir", tmp_path / "out", "--vllm_servers", "2"]
    python, door = warm_python(), "trl_ext.cli.main"
    if "ray" in options:
        python, door = sys.executable, SERVED
        words += ["--storage_path", tmp_path / "ray"]
    command = list(map(str, [python, "-m", door, "grpo", *words, *options]))
    variables = fake_servers.put_on_path(tmp_path / "bin") | {"FAKE_TRL_CLIENT": "1"} | variables
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path / "bin", env=environment() | variables, stdout=log, stderr=log)
    try:
        yield run
    finally:
        left = [run, *(process for process in psutil.process_iter(["environ"]) if is_of(process, tmp_path))]
        for process in left:
            process.kill()
        run.wait()


def is_of(process, tmp_path) -> bool:
    return (process.info["environ"] or {}).get(fake_servers.LOG, "").startswith(str(tmp_path))


def ends_with(code: int, run, tmp_path) -> str:
    """What a run has printed that ends with this code, and with nothing left of it."""
    assert run.wait(TIMEOUT_S) == code, (tmp_path / "log").read_text()[-6000:]
    until_s = time.monotonic() + 30
    while left := [one for one in psutil.process_iter(["environ", "cmdline"]) if is_of(one, tmp_path)]:
        assert time.monotonic() < until_s, [one.info["cmdline"] for one in left]
        time.sleep(0.2)
    return (tmp_path / "log").read_text()


def has_saved(run, step: int, tmp_path) -> None:
    """Wait for a checkpoint."""
    while not (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").exists():
        assert run.poll() is None, (tmp_path / "log").read_text()[-6000:]
        time.sleep(0.1)


def actor_of_the_first_server(tmp_path) -> psutil.Process:
    found = psutil.Process(servers(fake_servers.noted(tmp_path / "bin"))[0]["pid"]).parent()
    assert "ServerActor" in " ".join(found.cmdline())
    return found


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A machine with four GPUs, as far as Ray knows, and stand-ins for servers; returns settings of a run."""
    for name, value in fake_servers.put_on_path(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=1, num_gpus=4, include_dashboard=False, logging_level="ERROR")
    yield {
        "model_name_or_path": "a/model",
        "output_dir": str(tmp_path / "out"),
        "vllm_server_timeout": 60,
        "vllm_tensor_parallel_size": 2,
    }
    ray.shutdown()


def test_servers_get_gpus_of_their_own_and_the_run_ends_with_one_that_is_lost(cluster, tmp_path):
    with pytest.raises(LostProcessError, match=r"vLLM server 1 of 2 \(exit code -9\) has ended, and the run with it"):
        with serving_on_ray(2, 2, cluster, {}, is_alone=True) as (actors, words):
            first, second = sorted(servers(fake_servers.noted(tmp_path / "bin")), key=lambda line: line["cards"])
            assert (first["cards"], second["cards"]) == ("0,1", "2,3")
            assert ray.available_resources().get("GPU", 0) == 0
            assert (first["host"], second["host"], len(actors)) == ("127.0.0.1", "127.0.0.1", 2)
            assert {f"http://127.0.0.1:{line['port']}" for line in (first, second)} == set(words[1].split(","))
            ray.kill(actors[0])
            time.sleep(60)  # an interrupt ends it
    until_s = time.monotonic() + 30
    while any(map(runs, (first["pid"], second["pid"]))):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # Ray reaps what its actors leave, later
    except psutil.NoSuchProcess:
        return False


def weights(folder: Path) -> dict:
    return loaded(folder / "out" / "model.safetensors")


def difference(some: dict, others: dict) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in some)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The weights of a run without Ray."""
    tmp_path = tmp_path_factory.mktemp("alone")
    with running(folder, tmp_path, *ALONE) as run:
        ends_with(0, run, tmp_path)
    first = loaded(folder / "model" / "model.safetensors")
    assert difference(first, weights(tmp_path)) > 1e-4
    return weights(tmp_path)


@a_minute
def test_the_weights_are_those_of_a_run_without_ray(folder, alone, tmp_path):
    with running(folder, tmp_path, *ON_RAY, "--vllm_tensor_parallel_size", "2") as run:
        ends_with(0, run, tmp_path)
    assert difference(alone, weights(tmp_path)) == 0.0
    lines = fake_servers.noted(tmp_path / "bin")
    assert [(line["host"], line["tensor_parallel_size"]) for line in servers(lines)] == [("127.0.0.1", 2)] * 2
    asked = fake_servers.requests(lines, "/v1/completions")
    assert {line["port"] for line in asked} == {line["port"] for line in servers(lines)}
    joined = [line["body"]["init_info"] for line in fake_servers.requests(lines, "/init_weight_transfer_engine")]
    assert sorted((info["rank_offset"], info["world_size"]) for info in joined) == [(1, 5), (3, 5)]
    assert fake_servers.requests(lines, "broadcast")


@a_minute
@pytest.mark.parametrize("lost", ["server", "actor"])
def test_a_server_that_is_lost_ends_the_run_as_without_ray(lost, folder, tmp_path):
    with running(folder, tmp_path, *ON_RAY, *ENDLESS) as run:
        has_saved(run, 2, tmp_path)
        actor = actor_of_the_first_server(tmp_path)
        (actor if lost == "actor" else actor.children()[0]).kill()
        text = ends_with(6, run, tmp_path)
    assert "(exit code -9) has ended, and the run with it:" in text and "--resume_from_checkpoint true" in text
    assert text.count("Started training worker group") == 1


@a_minute
def test_an_actor_that_is_lost_while_samples_are_ahead_is_started_again(folder, alone, tmp_path):
    ahead = ("--generation_ahead", "1", "--max_steps", "40")
    with running(folder, tmp_path, *ON_RAY, *ahead) as run:
        has_saved(run, 2, tmp_path)
        actor_of_the_first_server(tmp_path).kill()
        text = ends_with(0, run, tmp_path)
    assert "A vLLM server was lost by step" in text
    assert sorted(json.loads((tmp_path / "out" / "vllm" / "starts.json").read_text())) == [1, 2]
    assert len({line["port"] for line in servers(fake_servers.noted(tmp_path / "bin"))}) == 2


@a_minute
def test_with_a_worker_that_is_lost_the_servers_start_again_and_weights_are_the_same(folder, alone, tmp_path):
    dies = {"DYING_SCRIPT": "trl_ext.scripts.grpo", "DYING_STEP": "2", "DYING_RANK": "0", "DYING_OF": "signal"}
    with running(folder, tmp_path, *ON_RAY, **dies) as run:
        text = ends_with(0, run, tmp_path)
    assert text.count("Started training worker group") == 2
    assert len(servers(fake_servers.noted(tmp_path / "bin"))) == 4
    assert difference(alone, weights(tmp_path)) == 0.0


@a_minute
def test_a_server_that_does_not_start_is_a_sentence_before_anything_trains(folder, tmp_path):
    with running(folder, tmp_path, *ON_RAY, FAKE_TRL="dies") as run:
        text = ends_with(2, run, tmp_path)
    assert "(exit code 1) has not started: 'No available memory for the cache blocks.'" in text
    assert "Traceback" not in text


@a_minute
def test_servers_end_with_a_driver_that_is_killed(folder, tmp_path):
    with running(folder, tmp_path, *ON_RAY, *ENDLESS) as run:
        has_saved(run, 1, tmp_path)
        os.kill(run.pid, signal.SIGKILL)
        ends_with(-signal.SIGKILL, run, tmp_path)

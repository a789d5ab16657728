"""`make drills`: Ray on two machines, which are two networks of this one; and a head node that is lost."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.multi.conftest import tiny_model as tiny_model
from tests.multi.launching import environment, loaded
from tests.multi.raying import PATIENCE_S, under_accelerate
from tests.multi.recipes import write_recipe
from tests.multi.test_two_machines import ADDRESSES
from tests.multi.test_two_machines import machines as machines

pytest.importorskip("ray")
PORT = 6379
# Of the cluster: nodes and programs that show another one are refused.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def inside(name, *words) -> list[str]:
    return ["ip", "netns", "exec", name, *map(str, words)]


@contextmanager
def node(name, address, folder, log, *words):
    """A node of a cluster with one CPU, in a network of its own; all its processes are gone at the end."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", 1, *words]
    command += ["--node-ip-address", address, "--temp-dir", folder, "--disable-usage-stats"]
    with log.open("w") as file:
        process = subprocess.Popen(inside(name, *command), env=environment() | TOKEN, stdout=file, stderr=file)
    try:
        yield process
    finally:
        lost(process)


def lost(process) -> None:
    """Kill a node, with all that it started."""
    try:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
    except psutil.NoSuchProcess:
        pass
    process.wait()


@contextmanager
def cluster(machines, tmp_path):
    """Two nodes; yields the process of the head."""
    (head_name, _), (name, _) = machines
    # Paths of sockets are short: not below pytest's folder.
    with ExitStack() as stack:
        folders = [Path(f"/tmp/trl_ext_ray_{os.getpid()}_{number}") for number in (0, 1)]
        head = stack.enter_context(
            node(head_name, ADDRESSES[0], folders[0], tmp_path / "head.log", "--head", "--port", PORT)
        )
        address = ("--address", f"{ADDRESSES[0]}:{PORT}")
        wait_for_head(head_name)
        stack.enter_context(node(name, ADDRESSES[1], folders[1], tmp_path / "node.log", *address))
        stack.callback(lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in folders])
        yield head


def wait_for_head(name) -> None:
    knock = f"import socket; socket.create_connection(({ADDRESSES[0]!r}, {PORT}), timeout=1)"
    for _ in range(120):
        if subprocess.run(inside(name, sys.executable, "-c", knock), capture_output=True).returncode == 0:
            return
    pytest.fail("the head node does not start")


def under_two_machines(machines, trainer, recipe, out, *options):
    words = ["--launcher", "ray", "--address", f"{ADDRESSES[0]}:{PORT}", "--num_workers", 2, "--config_file", "cpu"]
    words += ["--config", recipe, "--output_dir", out, "--storage_path", out.with_suffix(".ray"), *options]
    command = inside(machines[0][0], sys.executable, "-m", "trl_ext.cli.main", trainer, *words)
    log = out.with_suffix(".log").open("a")
    return subprocess.Popen(command, env=environment() | TOKEN, stdout=log, stderr=log)


@pytest.mark.parametrize("trainer", ["grpo", "reward"])
def test_two_machines_train_what_one_trains(trainer, machines, tiny_model, tmp_path):
    recipe = write_recipe(trainer, tiny_model, tmp_path)
    alone = under_accelerate(trainer, "cpu", recipe, tmp_path / "alone")
    with cluster(machines, tmp_path):
        run = under_two_machines(machines, trainer, recipe, tmp_path / "two")
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "two.log").read_text()[-5000:]
    text = (tmp_path / "two.log").read_text()
    assert f"ip={ADDRESSES[0]}" in text and f"ip={ADDRESSES[1]}" in text
    two = loaded(tmp_path / "two" / "model.safetensors")
    assert max((alone[name] - two[name]).abs().max().item() for name in alone) <= 1e-6


def test_a_lost_head_ends_the_run_and_the_same_command_resumes_it(machines, tiny_model, tmp_path):
    recipe = write_recipe("grpo", tiny_model, tmp_path)
    alone = under_accelerate("grpo", "cpu", recipe, tmp_path / "alone")
    with cluster(machines, tmp_path) as head:
        run = under_two_machines(machines, "grpo", recipe, tmp_path / "two")
        while run.poll() is None and not (tmp_path / "two" / "checkpoint-2").exists():
            time.sleep(0.1)
        assert run.poll() is None, (tmp_path / "two.log").read_text()[-5000:]
        lost(head)
        assert run.wait(PATIENCE_S) not in (0, None)
    with cluster(machines, tmp_path):
        run = under_two_machines(machines, "grpo", recipe, tmp_path / "two", "--resume_from_checkpoint", "true")
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "two.log").read_text()[-5000:]
    two = loaded(tmp_path / "two" / "model.safetensors")
    assert max((alone[name] - two[name]).abs().max().item() for name in alone) == 0.0


def test_a_cut_link_ends_the_run_which_names_the_lost_process(machines, tiny_model, tmp_path):
    recipe = write_recipe("grpo", tiny_model, tmp_path)
    out = tmp_path / "two"
    ((_, _), (name, cable)) = machines
    with cluster(machines, tmp_path):
        run = under_two_machines(machines, "grpo", recipe, out, "--ddp_timeout", 5, "--max_steps", 100_000)
        while run.poll() is None and not (out / "checkpoint-2").exists():
            time.sleep(0.1)
        assert run.poll() is None, out.with_suffix(".log").read_text()[-5000:]
        subprocess.run(["ip", "-n", name, "link", "set", cable, "down"], check=True)
        begun = time.monotonic()
        try:
            assert run.wait(PATIENCE_S) != 0
        finally:
            subprocess.run(["ip", "-n", name, "link", "set", cable, "up"], check=True)
    print(f"ended {time.monotonic() - begun:.0f} s after the cut")
    assert "Process 1 (machine" in out.with_suffix(".log").read_text()

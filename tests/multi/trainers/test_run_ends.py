"""Runs that are told to end, or lose a process, end: saved where that is possible, the lost process named."""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import PROGRAMS, YAMLS, Started, launched
from tests.multi.recipes import write_recipe
from tests.multi.warm import warm_python

DDP_TIMEOUT_S = 5


@pytest.fixture
def arguments(tiny_model, tmp_path):
    settings = dict(per_device_train_batch_size=1, save_steps=500, ddp_timeout=DDP_TIMEOUT_S, packing=False)
    # For ever, where nothing ends it.
    recipe = write_recipe("reward", tiny_model, tmp_path, max_steps=100_000, **settings)
    return ["--config", recipe, "--output_dir", str(tmp_path / "out")]


@pytest.fixture
def start(arguments, tmp_path):
    """Start the worker by a launcher, and wait for its second step; `start.command` starts `trl-ext`."""
    begun = []

    def started(command) -> Started:
        begun.append(Started(command, tmp_path / "log"))
        begun[-1].until(lambda: "\nstep 2/" in begun[-1].text)
        return begun[-1]

    def with_worker(command, *options) -> Started:
        return started([*command, PROGRAMS / "ending.py", tmp_path, *arguments, *options])

    with_worker.command = lambda *options: started(
        [warm_python(), "-m", "trl_ext.cli.main", "reward", *options, *arguments]
    )
    yield with_worker
    for one in begun:
        for file in tmp_path.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        one.end()


def pid(run: Started, rank: int) -> int:
    return int((run.log.parent / f"{rank}.pid").read_text())


def saved_step(folder: Path) -> int:
    (checkpoint,) = (folder / "out").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert len(list(checkpoint.glob("rng_state*"))) in (1, 2)
    return state["global_step"]


def test_sigterm_to_accelerate_saves_on_all_processes(start):
    run = start(launched("cpu", 2))
    run.process.send_signal(signal.SIGTERM)
    assert run.code() != 0  # of accelerate's; its processes' own code is lost with it
    assert f"checkpoint-{saved_step(run.log.parent)} after SIGTERM" in run.text


ENDS = [(1, signal.SIGINT), (2, signal.SIGTERM), *([(1, signal.SIGTERM), (2, signal.SIGINT)] if IS_THOROUGH else [])]


@pytest.mark.parametrize(("num_processes", "number"), ENDS)
def test_trl_ext_passes_signals_on_and_tells_that_it_saved(start, number, num_processes):
    name = "cpu" if num_processes == 2 else "single_gpu"
    launcher = ("--config_file", YAMLS[name], "--num_processes", num_processes, "--main_process_port", 0)
    run = start.command(*launcher)
    run.process.send_signal(number)
    assert run.code() == 75
    assert f"checkpoint-{saved_step(run.log.parent)} after {number.name}" in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stopped_process_is_named(start, rank):
    run = start(launched("cpu", 2))
    os.kill(pid(run, rank), signal.SIGSTOP)
    run.until(lambda: f"process id {pid(run, rank)}) does not answer" in run.text)
    assert f"Process {rank} (machine" in run.text
    os.kill(pid(run, rank), signal.SIGKILL)  # PyTorch's launcher does so, too, after 30 seconds
    assert run.code() != 0


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_dead_process_is_named(start, rank):
    run = start(launched("cpu", 2))
    os.kill(pid(run, rank), signal.SIGKILL)
    assert run.code() != 0
    assert f"Process {rank} (machine" in run.text and f"process id {pid(run, rank)}) has ended" in run.text


def test_a_dead_process_is_named_where_the_launcher_ends_the_others_before_they_speak(start, tmp_path):
    (tmp_path / "late").touch()
    run = start(launched("cpu", 2))
    os.kill(pid(run, 1), signal.SIGKILL)
    assert run.code() != 0
    assert run.text.count(f"process id {pid(run, 1)}) has ended") == 1


def test_storage_that_hangs_ends_the_run_which_names_the_process(start, tmp_path):
    hang = tmp_path / "hang-1"
    hang.touch()
    run = start(launched("cpu", 2), "--save_steps", 3, "--ddp_timeout", 12)
    run.until(lambda: f"process id {pid(run, 1)}) does not answer" in run.text)
    named = run.text.partition("error: ")[2]
    assert re.match(r"Process 1 \(.*The checkpoint of step \d+ was being written; its storage may be slow\.", named)
    os.kill(pid(run, 1), signal.SIGKILL)  # PyTorch's launcher does so, too, after 30 seconds
    assert run.code() != 0

"""Runs that are told to end, or lose a process, end: saved where that is possible, the lost process named."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.multi import launching
from tests.multi.launching import PROGRAMS, launched
from tests.multi.warm import warm_python

PATIENCE_S = 300  # of a run that does not end
DDP_TIMEOUT_S = 5


@pytest.fixture
def arguments(tiny_model, tmp_path):
    rows = [{"prompt": f"w{i} ", "chosen": f"w{10 + i} w3", "rejected": f"w{20 + i}"} for i in range(64)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(
        model_name_or_path=tiny_model,
        dataset_name=tmp_path / "pairs.jsonl",
        output_dir=tmp_path / "out",
        per_device_train_batch_size=1,
        logging_steps=1,
        max_steps=100_000,  # for ever, where nothing ends it
        ddp_timeout=DDP_TIMEOUT_S,
        packing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        eval_strategy="no",
    )
    return [str(word) for key, value in settings.items() for word in (f"--{key}", value)]


class Started:
    """A launch that runs; `process` is the launcher."""

    def __init__(self, command, folder: Path):
        self.folder, self.log = folder, folder / "log"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=launching.environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def until(self, is_so) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.05)

    def until_step(self, number: int) -> None:
        self.until(lambda: f"\nstep {number}/" in self.text)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def code(self) -> int:
        code = self.process.wait(PATIENCE_S)
        print(self.text[-6000:])  # shown where the test fails
        return code

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())


@pytest.fixture
def start(arguments, tmp_path):
    begun = []

    def with_worker(command, *options) -> Started:
        command = [*command, PROGRAMS / "ending_worker.py", tmp_path, *arguments, *options]
        begun.append(Started(command, tmp_path))
        begun[-1].until_step(2)
        return begun[-1]

    def with_command(*options) -> Started:
        command = [warm_python(), "-m", "trl_ext.cli.main", "reward", *options, *arguments]
        begun.append(Started(command, tmp_path))
        begun[-1].until_step(2)
        return begun[-1]

    with_worker.command = with_command
    yield with_worker
    for one in begun:
        for file in tmp_path.glob("*.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGTERM)  # its own session, started above
            one.process.wait(PATIENCE_S)


def saved_step(folder: Path) -> int:
    (checkpoint,) = (folder / "out").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert len(list(checkpoint.glob("rng_state*"))) in (1, 2)
    return state["global_step"]


def test_sigterm_to_accelerate_saves_on_all_processes(start):
    run = start(launched("cpu", 2))
    run.process.send_signal(signal.SIGTERM)
    assert run.code() != 0  # of accelerate's; its processes' own code is lost with it
    assert f"checkpoint-{saved_step(run.folder)} after SIGTERM" in run.text


ENDS = [(1, signal.SIGINT), (2, signal.SIGTERM), *([(1, signal.SIGTERM), (2, signal.SIGINT)] if IS_THOROUGH else [])]


@pytest.mark.parametrize(("num_processes", "number"), ENDS)
def test_trl_ext_passes_signals_on_and_tells_that_it_saved(start, number, num_processes):
    name = "cpu" if num_processes == 2 else "single_gpu"
    launcher = ("--config_file", launching.YAMLS[name], "--num_processes", num_processes, "--main_process_port", 0)
    run = start.command(*launcher)
    run.process.send_signal(number)
    assert run.code() == 75
    assert f"checkpoint-{saved_step(run.folder)} after {number.name}" in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stopped_process_is_named(start, rank):
    run = start(launched("cpu", 2))
    os.kill(run.pid(rank), signal.SIGSTOP)
    run.until(lambda: f"process id {run.pid(rank)}) does not answer" in run.text)
    assert f"Process {rank} (machine" in run.text
    os.kill(run.pid(rank), signal.SIGKILL)  # PyTorch's launcher does so, too, after 30 seconds
    assert run.code() != 0


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_dead_process_is_named(start, rank):
    run = start(launched("cpu", 2))
    os.kill(run.pid(rank), signal.SIGKILL)
    assert run.code() != 0
    assert f"Process {rank} (machine" in run.text and f"process id {run.pid(rank)}) has ended" in run.text


def test_a_dead_process_is_named_where_the_launcher_ends_the_others_before_they_speak(start, tmp_path):
    (tmp_path / "late").touch()
    run = start(launched("cpu", 2))
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.code() != 0
    assert run.text.count(f"process id {run.pid(1)}) has ended") == 1


def test_storage_that_hangs_ends_the_run_which_names_the_process(start, tmp_path):
    hang = tmp_path / "hang-1"
    hang.touch()
    run = start(launched("cpu", 2), "--save_steps", 3, "--ddp_timeout", 12)
    run.until(lambda: f"process id {run.pid(1)}) does not answer" in run.text)
    named = run.text.partition("error: ")[2]
    assert re.match(r"Process 1 \(.*The checkpoint of step \d+ was being written; its storage may be slow\.", named)
    os.kill(run.pid(1), signal.SIGKILL)  # PyTorch's launcher does so, too, after 30 seconds
    assert run.code() != 0

"""What is saved, and the exit code, do not depend on who reads the output: `| head`, `| tee log` and Ctrl-C."""

import os
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from tests.multi.launching import PATIENCE_S, PROGRAMS, ROOT, environment
from tests.multi.recipes import write_recipe
from tests.multi.warm import warm_python
from tests.nightly import nightly

NUM_STEPS = 5
KINDS = ("script", "program", "launcher")
PLACES = ("start", "step", "save", "end")
STREAMS = ("stdout", "stderr", "both")
ENDS = (None, signal.SIGINT, signal.SIGTERM)
DAILY = {
    ("script", "start", "both", None),
    ("script", "step", "both", signal.SIGTERM),
    ("program", "end", "stdout", None),
    ("launcher", "save", "both", signal.SIGINT),
    ("launcher", "end", "both", signal.SIGINT),
}
CASES = [case if case in DAILY else nightly(*case) for case in product(KINDS, PLACES, STREAMS, ENDS)]
# There is nothing to save before the first step has ended: a signal comes when the reader is long gone.
SIGNAL_AT = {"start": "step"}


def command(kind: str, recipe: str, folder: Path) -> list[str]:
    if kind == "program":
        return [str(warm_python()), str(PROGRAMS / "own_program.py"), recipe, str(folder)]
    module = "trl_ext.scripts.grpo" if kind == "script" else "trl_ext.cli.main"
    options = ["grpo", "--num_processes", "2", "--config_file", "cpu", "--main_process_port", "0"]
    words = [str(warm_python()), "-m", module, *(options if kind == "launcher" else [])]
    return [*words, "--config", recipe, "--output_dir", str(folder)]


def until(process: subprocess.Popen, file: Path, reader: int) -> None:
    """Wait until the run has come to a place; a run that has ended fails the test."""
    while not file.exists():
        assert process.poll() is None, os.read(reader, 2**16).decode()
        time.sleep(0.05)


@pytest.mark.parametrize(("kind", "place", "stream", "end"), CASES)
def test_a_reader_that_leaves_changes_neither_what_is_saved_nor_the_exit_code(
    kind, place, stream, end, tiny_model, tmp_path
):
    saves = {"save_strategy": "no"} if end is None and place != "save" else {"save_steps": 3}
    changes = dict(max_steps=NUM_STEPS, log_completions=True, per_device_train_batch_size=2, num_generations=2)
    recipe, folder = write_recipe("grpo", tiny_model, tmp_path, **changes, **saves), tmp_path / "out"
    signal_at = SIGNAL_AT.get(place, place)
    held = dict(HOLD_IN=str(tmp_path), HOLD_AT=f"{place} {signal_at}", RUN_FIRST=str(PROGRAMS / "holding.py"))
    reader, writer = os.pipe()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command(kind, recipe, folder),
            cwd=ROOT,
            env=environment() | held | {"TRL_EXT_REPORT": "1"},
            stdout=log if stream == "stderr" else writer,
            stderr=log if stream == "stdout" else writer,
            start_new_session=True,
        )
    os.close(writer)
    try:
        until(process, tmp_path / f"{place}.held", reader)
        os.close(reader)
        if end is not None and signal_at != place:
            (tmp_path / f"{place}.go").touch()
            until(process, tmp_path / f"{signal_at}.held", reader)
        if end is not None:
            os.killpg(process.pid, end)
            until(process, tmp_path / "signalled", reader)  # a launcher passes it on, late on a busy machine
        for name in (place, signal_at):
            (tmp_path / f"{name}.go").touch()
        code = process.wait(PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    print((tmp_path / "log").read_text()[-4000:])  # shown where the test fails
    is_whole = end is None or place == "end"  # a signal in the last step changes nothing
    saved_step = NUM_STEPS - 1 if place == "save" else 3
    assert code == (0 if is_whole else 75)
    assert (folder / ("" if is_whole else f"checkpoint-{saved_step}") / "model.safetensors").is_file()
    assert (folder / "report.html").is_file()

"""The Python that launches fork from behaves as the one that it stands for."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.multi.warm import warm_python

# What a script can see of how it was started.
SEES = """
import json, os, sys, __main__
print(json.dumps([sys.argv, os.getcwd(), os.environ["WORD"], __name__, __main__.__file__, sys.path[0]]))
"""
ENDS = {
    "the end": "",
    "a code": "import sys; sys.exit(5)",
    "an exception": "raise ValueError('of a test')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
    "at once": "import os; os._exit(7)",
}


@pytest.fixture
def script(tmp_path):
    def write(text: str):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def ran(python, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([python, "-u", *arguments], capture_output=True, text=True, **options)


def test_a_script_sees_the_same(script, tmp_path):
    options = {"cwd": tmp_path, "env": os.environ | {"WORD": "given"}}
    warm, cold = (ran(python, script(SEES), "--a", "b c", **options) for python in (warm_python(), sys.executable))
    assert warm.stdout == cold.stdout != ""


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_it_ends_alike(script, text):
    warm, cold = (ran(python, script(text)) for python in (warm_python(), sys.executable))
    assert warm.returncode == cold.returncode
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_a_signal_to_the_program_ends_the_fork(script):
    path = script("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with subprocess.Popen([warm_python(), path], stdout=subprocess.PIPE, text=True) as program:
        fork = int(program.stdout.readline())
        program.terminate()
        assert program.wait() == -signal.SIGTERM
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{fork}"):
        assert time.monotonic() < deadline, "the fork goes on"
        time.sleep(0.05)


def test_the_libraries_are_there_and_no_thread_is(script):
    text = "import os, sys; print('trl.trainer.grpo_trainer' in sys.modules, len(os.listdir('/proc/self/task')))"
    assert ran(warm_python(), script(text)).stdout == "True 1\n"

"""A process that a launcher has started does not outlive it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trl_ext.trainers.record.launch import is_launcher

pytestmark = pytest.mark.slow

CHILD = (
    "import os, time; from trl_ext.scripts.process import end_with_launcher; end_with_launcher(); "
    "print('ready', flush=True); time.sleep(600)"
)
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def started(folder, name: str) -> subprocess.Popen:
    program = folder / name
    program.write_text(LAUNCHER)
    command = [sys.executable, str(program), "launch", "script"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)


@pytest.mark.skipif(sys.platform != "linux", reason="the bond is Linux's")
def test_a_killed_launcher_leaves_no_process_behind(tmp_path):
    with started(tmp_path, "accelerate") as launcher:
        assert launcher.stdout.readline() == b"ready\n"
        launcher.send_signal(signal.SIGKILL)
        assert launcher.stdout.read() == b""  # at its end when the last process that could write is gone


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("name", "is_one"), [("accelerate", True), ("torchrun", True), ("my_accelerate.py", False)])
def test_a_launcher_is_known_by_its_name(tmp_path, name, is_one):
    with started(tmp_path, name) as launcher:
        launcher.stdout.readline()
        assert is_launcher(launcher.pid) is is_one
        for process in subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)]).split():
            os.kill(int(process), signal.SIGKILL)

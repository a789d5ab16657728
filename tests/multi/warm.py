"""A process that has the libraries imported and forks for every Python that a launch starts: 20 seconds of processor
time less for each launch of two ranks.

The launch is accelerate's own. Its `PYTHON_EXEC` names a small program in this process's place, which hands its
arguments, environment, folder and open files to the server, and ends as the fork does. A fork starts as a fresh Python
would but for its imports; it gets SIGTERM and SIGINT that are sent to the program, whose death ends it.
"""

import array
import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from trl_ext.rewards.isolation.kernel import call

# What launches, workers and the memory twin import on their way; DeepSpeed if it is there.
PRELOADED = (
    *("tests.twin.run", "trl_ext.scripts.grpo"),
    *(f"trl_ext.trainers.{trainer}.trainer" for trainer in ("reward", "grpo", "ppo")),
    *("peft", "trl.trainer.grpo_trainer", "trl.trainer.reward_trainer", "deepspeed", "deepspeed.comm.torch"),
    *("accelerate.commands.launch", "torch.distributed.run", "datasets"),
)

ROOT = Path(__file__).parents[2]
PATIENCE_S = 10.0  # between asking a fork to end and ending it
# The program in Python's place: needs nothing but the standard library, and starts in 30 ms.
PROGRAM = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
job = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
files = array.array("i", [0, 1, 2])
server.sendmsg([len(job).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.sendall(job)
fork = int.from_bytes(server.recv(4), "big")
def pass_on(number, frame):
    try:
        os.kill(fork, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, pass_on)
code = int.from_bytes(server.recv(4) or b"\\0\\0\\0\\1", "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def warm_python(package: Path = ROOT) -> Path:
    """What stands for Python in this test run; starts the server. `package` is the folder that holds `trl_ext`."""
    folder = tempfile.TemporaryDirectory(prefix="warm")  # short: a socket's path has 107 characters at most
    path = os.path.join(folder.name, "socket")
    program = Path(folder.name, "python")
    program.write_text(PROGRAM.format(python=sys.executable, path=path))
    program.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    log = open(os.path.join(folder.name, "log"), "w")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    process = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        cwd=folder.name,
        env=environment,
        stdout=log,
        stderr=log,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    atexit.register(folder.cleanup)
    atexit.register(process.terminate)
    return program


# The server -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer until told to end. One fork waits for each fork that works."""
    del sys.path[0]  # the folder of this file, where `trainers` and `memory` are tests
    for name in PRELOADED:
        try:
            import_module(name)
        except ImportError:  # an installed package comes without tests
            if not name.startswith(("deepspeed", "tests.")):
                raise
    sys.path.insert(0, "")  # a fork puts its own folder there
    gc.freeze()  # a fork copies a page on its first write, and collecting writes on all
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks after those that wait
    while True:
        program, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work = _serve(program)
            break
        program.close()
    work()  # outside the loop: it ends as a script does, with its own traceback and exit code


def _serve(program: socket.socket):
    """Returns in the fork that works only, what it has to do."""
    arguments, environment, folder, files = _received(program)
    _enter_network(program)
    worker = os.fork()
    if worker:
        program.sendall(worker.to_bytes(4, "big"))
        _wait(worker, program)
    program.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return _script(arguments)


def _enter_network(program: socket.socket) -> None:
    """Enter the network namespace of whoever asked, where it is another one."""
    pid, *_ = struct.unpack("3i", program.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        with open(f"/proc/{pid}/ns/net") as network:
            call("setns", network.fileno(), 0)


def _received(program: socket.socket):
    size = array.array("i").itemsize
    head, (files, *_), *_ = program.recvmsg(8, socket.CMSG_LEN(3 * size))
    left, job = int.from_bytes(head, "big"), b""
    while len(job) < left:
        job += program.recv(left - len(job))
    return *json.loads(job), array.array("i", files[2][: 3 * size])


def _wait(worker: int, program: socket.socket) -> None:
    """Until it has ended, or whoever asked for it has. Never returns."""
    ended = os.pidfd_open(worker)
    ready, _, _ = select.select([ended, program], [], [])
    for number in () if ended in ready else (signal.SIGTERM, signal.SIGKILL):
        os.kill(worker, number)
        if select.select([ended], [], [], PATIENCE_S)[0]:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with suppress(OSError):
        program.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _script(arguments: list[str]):
    """What `python ARGUMENTS` would run."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    for first in filter(None, os.environ.get("RUN_FIRST", "").split(os.pathsep)):  # what a test changes in libraries
        runpy.run_path(first)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    # As Python has it: the folder of a script, the working folder for a module.
    sys.path[0] = os.getcwd() if is_module else str(Path(arguments[0]).parent.absolute())
    if is_module:
        return lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

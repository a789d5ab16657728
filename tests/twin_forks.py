"""A process that has the libraries imported and forks for every simulation: seconds are saved on each.

`python -m tests.twin_forks` reads one simulation a line from its input and answers one line of JSON each,
until its input ends. Every simulation is still a process of its own.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from trl_ext.twin.driver import PREFIX, TwinResult, environment, read_answer
from trl_ext.twin.simulation import Simulation, why_not

# What trainers import on their way; DeepSpeed if it is there.
PRELOADED = (
    "trl_ext.twin.run",
    *(f"trl_ext.trainers.{trainer}.trainer" for trainer in ("reward", "grpo", "ppo")),
    *("peft", "trl.trainer.grpo_trainer", "trl.trainer.reward_trainer", "deepspeed", "deepspeed.comm.torch"),
)


@contextmanager
def serving() -> Iterator[Callable[[Simulation], TwinResult]]:
    """Yield a function that runs simulations one after the other, in forks of a process that is warm after the first.

    with serving() as run:
        results = [run(simulation) for simulation in simulations]
    """
    command = [sys.executable, "-m", "tests.twin_forks"]
    root = Path(__file__).parent.parent
    env = {**environment(None), "DS_ACCELERATOR": "cpu"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=root
        ) as server,
    ):
        yield lambda simulation: _ask(server, simulation, errors)
        assert server.stdin is not None
        with suppress(BrokenPipeError):
            server.stdin.close()


def _ask(server: "subprocess.Popen[str]", simulation: Simulation, errors: IO[str]) -> TwinResult:
    assert server.stdin is not None and server.stdout is not None
    if sentence := why_not(simulation):
        return TwinResult({}, refusal=sentence)
    line = ""
    with suppress(BrokenPipeError):  # it has died, and says below of what
        server.stdin.write(json.dumps(asdict(simulation)) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
    if not line:
        errors.seek(0)
        return read_answer("", errors.read())
    answer = json.loads(line)
    return read_answer(answer["output"], answer["errors"])


def serve() -> None:
    """Answer simulations until the input ends."""
    preload(PRELOADED)
    gc.freeze()  # a fork copies a page when it first writes to it, and collecting would write to all
    # What libraries print must not stand between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(_in_a_fork(Simulation(**json.loads(line)))) + "\n")
            answers.flush()


def preload(names: Iterable[str]) -> None:
    """Import the modules; DeepSpeed's if it is installed."""
    for name in names:
        try:
            import_module(name)
        except ImportError:
            if not name.startswith("deepspeed"):
                raise


def _in_a_fork(simulation: Simulation) -> dict[str, str]:
    """What the simulation's process printed, and its errors."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            _be_the_child(simulation, output, errors)
        os.waitpid(child, 0)
        output.seek(0)
        errors.seek(0)
        return {"output": output.read(), "errors": errors.read()}


def _be_the_child(simulation: Simulation, output: IO[Any], errors: IO[Any]) -> None:
    """Never returns: what the parent has open is not this process's to close."""
    os.dup2(errors.fileno(), 2)
    code = 1
    try:
        from trl_ext.twin.run import run

        os.environ.update(environment(simulation))
        output.write(PREFIX + json.dumps(run(simulation)) + "\n")
        output.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    serve()

"""Runs in forks of a process in which the trainer stands: each costs what it does, and no import."""

import json
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from tests.faults import points
from tests.faults.jobs import OUTPUT_DIR, outcome
from tests.faults.points import Point
from trl_ext.errors import ConfigError
from trl_ext.scripts.exit import user_errors

LIMIT_S = 120  # of a run that takes one or two, on a machine that is busy
HUNG, MISSED = 97, 98  # exit codes: of a run that did not end, and of one that did not meet its point
LOG, RESULT = "log.txt", "result.json"


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Args:
        code: Exit code, negative for a signal.
        result: Its `outcome`, or None.
        log: Everything that it printed.
    """

    code: int
    result: dict[str, Any] | None
    log: str

    def well(self) -> dict[str, Any]:
        """Return the result of a run that has to end well."""
        assert self.result is not None, f"exit code {self.code}\n{self.log[-4000:]}"
        return self.result

    @property
    def error(self) -> str:
        """The sentence after "error:"; empty if there is none."""
        lines = [line for line in self.log.splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ") if lines else ""


def prepare() -> None:
    """Make this process one that can be forked, and whose forks can be killed."""
    torch.set_num_threads(1)
    # tqdm's own lock is shared with forks: one that is killed within it would stop all others for ever.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    # What was written outlives a kill; only a power cut would need more.
    os.fsync = lambda fd: None


def in_fork(folder: Path, work: Callable[[], dict[str, Any] | None], limit_s: float = LIMIT_S) -> Ending:
    """Do the work in a fork that stands in `folder`, with the exit codes of our scripts."""
    (folder / OUTPUT_DIR).mkdir(parents=True, exist_ok=True)  # as the trainer has made it where it was built
    (folder / RESULT).unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        be_the_child(folder, work)
    return ending_of(folder, wait(child, limit_s))


def ending_of(folder: Path, code: int) -> Ending:
    """Read what a process has left in its folder."""
    result, log = folder / RESULT, folder / LOG
    return Ending(code, json.loads(result.read_text()) if result.is_file() else None, log.read_text())


def be_the_child(folder: Path, work: Callable[[], dict[str, Any] | None]) -> None:
    """Do the work and end, with the exit codes of our scripts. Never returns."""
    code = 1
    try:
        go_to(folder)
        with user_errors():
            result = work()
        if result is not None:
            Path(RESULT).write_text(json.dumps(result))
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def go_to(folder: Path) -> None:
    """Work in this folder from now on, and print into its log."""
    os.chdir(folder)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def wait(child: int, limit_s: float = LIMIT_S) -> int:
    """Return the child's exit code, or HUNG after ending one that does not end."""
    ended = os.pidfd_open(child)
    try:
        is_hung = not select.select([ended], [], [], limit_s)[0]
    finally:
        os.close(ended)
    if is_hung:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return HUNG if is_hung else code


# Killed runs ------------------------------------------------------------------------------------------------------


@dataclass
class Victims(TrainerCallback):
    """Forks the run at the beginning of a step for each point in it: the fork goes on until it is killed there, in a
    folder of its own, and the run itself waits.

    Args:
        trainer: Whose run it is.
        points: By folder.
        calls: Of the steps, see `points.CallCounts`.
        codes: Exit codes by folder, as they come.
    """

    trainer: Any
    points: dict[str, Point]
    calls: dict[int, dict[str, int]]
    codes: dict[str, int]
    is_one: bool = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for folder, point in self.points.items():
            if self.is_one or point.step != state.global_step + 1:
                continue
            child = os.fork()
            if child:
                self.codes[folder] = wait(child)
                continue
            self.is_one = True
            shutil.copytree(OUTPUT_DIR, Path(folder, OUTPUT_DIR))
            go_to(Path(folder))
            points.meet(self.trainer, point, self.calls[point.step])


def run(trainer: Any) -> dict[str, Any]:
    """Train from the start."""
    trainer.train()
    return outcome(trainer)


def counted_run(trainer: Any) -> dict[str, Any]:
    """Train from the start, and count the calls."""
    with points.counted(trainer) as calls:
        trainer.train()
    return outcome(trainer) | {"calls": calls}


def run_with_victims(trainer: Any, chosen: dict[str, Point], calls: dict[int, dict[str, int]]) -> dict[str, Any]:
    """Train from the start, forking those that are killed; return their exit codes, too."""
    victims = Victims(trainer, chosen, calls, {})
    trainer.add_callback(victims)
    try:
        trainer.train()
    finally:
        if victims.is_one:
            traceback.print_exc()
            os._exit(MISSED)
    return outcome(trainer) | {"codes": victims.codes}


def run_with_signal(trainer: Any, point: Point, calls: dict[int, dict[str, int]], number: int) -> dict[str, Any]:
    """Train from the start, and get a signal at the point."""
    trainer.add_callback(points.Meets(trainer, point, calls, lambda: os.kill(os.getpid(), number)))
    return run(trainer)


def resume(trainer: Any, wanted: str | bool = True) -> dict[str, Any]:
    """Go on from the newest whole checkpoint or the one that is named; start afresh where there is no checkpoint."""
    try:
        trainer.train(resume_from_checkpoint=wanted)
    except ConfigError as error:
        if not str(error).startswith("There is no checkpoint"):
            raise
        trainer.train()
    return outcome(trainer)

"""Points at which a run is ended: counted calls, so that the same point is met in every run."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from tests.faults.jobs import OUTPUT_DIR, STEPS

NUM_RANDOM = 100
NUM_SIGNALS = 16
# Methods of the trainer, and whether they are in every trainer. A point is before or after the n-th call in its step.
METHODS = {"generate": "_generate", "score": "_calculate_rewards", "save": "_save_checkpoint"}
# What the operating system is asked to do with files, by the name that Python's audit gives it.
FILE_EVENTS = {"mkdir": "os.mkdir", "rename": "os.rename", "remove": "os.remove", "rmdir": "os.rmdir"}
UNFINISHED = "_unfinished"  # where checkpoints are written


@dataclass(frozen=True)
class Point:
    """A moment in a run.

    Args:
        step: Optimizer step, from 1.
        what: One of METHODS or FILE_EVENTS, "forward", "backward", "optimizer", "written FILE", "half FILE", "call".
        number: The how manieth time in this step, from 1; of "call", the fraction of the step's or the save's calls.
        when: "before" or "after"; of "call", "step" or "save".
    """

    step: int
    what: str
    number: float = 1
    when: str = "after"

    @property
    def is_of_rank_0(self) -> bool:
        """True if only the first of several processes meets it: it renames and removes."""
        return self.what in FILE_EVENTS

    def __str__(self) -> str:
        return f"step {self.step}: {self.when} {self.what} {self.number:g}"


def chosen(kind: str, files: list[str]) -> list[Point]:
    """Points in every part of a step: generation, both halves of an accumulation window, each file of a save, the
    rename, and the removal of an old checkpoint.

    Args:
        kind: Of trainer.
        files: Of the last checkpoint.
    """
    # Rollouts are generated in steps 1, 5 and 9; steps 6 to 8 use them up. An epoch ends in steps 4 to 8.
    generation = [
        Point(5, "forward", 3),
        Point(5, "generate"),
        Point(9, "score", when="before"),
        Point(9, "score"),
    ]
    training = [
        Point(1, "backward"),
        Point(2, "backward", 2),
        Point(6, "backward"),
        Point(7, "backward", 2),
        Point(8, "optimizer", when="before"),
        Point(9, "optimizer"),
        Point(10, "backward", 2),
    ]
    saving = [
        Point(1, "save", when="before"),
        Point(6, "save", when="before"),
        Point(7, "save"),
        Point(10, "save"),
        *(_of_file(2 + i % 8, "written", name) for i, name in enumerate(files)),
        *(_of_file(3 + i % 8, "half", name) for i, name in enumerate(files)),
        Point(1, "half model.safetensors" if "model.safetensors" in files else "half adapter_model.safetensors"),
        Point(1, "written trainer_state.json"),
    ]
    moving = [Point(4 + i, "rename", when=when) for i, when in enumerate(("before", "after"))]
    removing = [
        Point(5, "remove", 1, "before"),
        Point(6, "remove", 2),
        Point(8, "rmdir", 1, "before"),
        Point(9, "rmdir"),
    ]
    return [*(generation if kind != "reward" else []), *training, *saving, *moving, *removing]


def _of_file(step: int, what: str, name: str) -> Point:
    """The point of a file of the last checkpoint in another: DeepSpeed names its folder by the step."""
    return Point(step, f"{what} {name.replace(f'global_step{STEPS}/', f'global_step{step}/')}")


def at_random(kind: str) -> list[Point]:
    """Points anywhere: about half of them in a step, the others in its save."""
    draw = random.Random(kind)
    parts = [draw.choice(("step", "save")) for _ in range(NUM_RANDOM)]
    return [Point(draw.randrange(1, STEPS + 1), "call", round(draw.random(), 4), part) for part in parts]


def of_signals(kind: str) -> list[Point]:
    """Points at which a signal comes: neither in the first step, before which nothing is to save, nor in the last.

    A step that saves nothing has fewer calls than those that were counted, so that some come one or two steps later.
    """
    draw = random.Random(f"signals {kind}")
    return [Point(draw.randrange(2, 7), "call", round(0.3 * draw.random(), 4), "step") for _ in range(NUM_SIGNALS)]


# Meeting a point --------------------------------------------------------------------------------------------------


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def meet(trainer: Any, point: Point, calls: dict[str, int] | None = None, act: Callable[[], None] = die) -> None:
    """Have `act` called at the point.

    Args:
        trainer: Its step has just begun.
        point: In this step.
        calls: How many calls this step and its save have, by "step" and "save".
        act: What happens there.
    """
    what, _, name = point.what.partition(" ")
    count = Countdown(point.number, act)
    if what == "call":
        assert calls is not None
        limit = max(1, int(point.number * calls[point.when]))
        start = lambda: sys.setprofile(Countdown(limit, act).profile)  # noqa: E731
        start() if point.when == "step" else _around(trainer, "_save_checkpoint", "before", start)
    elif what in METHODS:
        _around(trainer, METHODS[what], point.when, count)
    elif what == "forward":
        # Of generation: the only ones without gradient that the model itself is called for.
        trainer.model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else count())
    elif what == "backward":
        _around(trainer.accelerator, "backward", point.when, count)
    elif what == "optimizer":
        trainer.add_callback(OptimizerSteps(point.when, count))
    elif what in FILE_EVENTS:
        _on_file_event(FILE_EVENTS[what], point.when, count)
    elif what in ("written", "half"):
        watch = Appearance(name, point.step, what == "half", act)
        _around(trainer, "_save_checkpoint", "before", lambda: sys.setprofile(watch.profile))
    else:
        raise ValueError(f"no point is called {point.what}")


@dataclass
class Countdown:
    """Acts when it is called for the n-th time."""

    left: float
    act: Callable[[], None]

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """As `sys.setprofile` calls it, for each call and return of a function."""
        self()


@dataclass
class Appearance:
    """Acts at the first call or return of a function at which a file of a checkpoint is there.

    Args:
        name: The file, from the checkpoint's folder on.
        step: The checkpoint's.
        is_half: Cut the file to half its size before.
        act: What happens then.
    """

    name: str
    step: int
    is_half: bool
    act: Callable[[], None]

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """As `sys.setprofile` calls it."""
        for place in (OUTPUT_DIR, os.path.join(OUTPUT_DIR, UNFINISHED)):
            path = os.path.join(place, f"checkpoint-{self.step}", self.name)
            if _size_bytes(path) > 0:
                sys.setprofile(None)
                if self.is_half:
                    os.truncate(path, os.path.getsize(path) // 2)
                self.act()


@dataclass
class Meets(TrainerCallback):
    """Has `act` called at the point.

    Args:
        trainer: The trainer.
        point: Where.
        calls: Of the steps, see `CallCounts`.
        act: What happens there.
    """

    trainer: Any
    point: Point
    calls: dict[int, dict[str, int]]
    act: Callable[[], None] = die

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.point.step:
            meet(self.trainer, self.point, self.calls[self.point.step], self.act)


class OptimizerSteps(TrainerCallback):
    """Calls back before or after an optimizer step."""

    def __init__(self, when: str, act: Callable[[], None]):
        setattr(self, "on_pre_optimizer_step" if when == "before" else "on_optimizer_step", lambda *_, **__: act())


def _size_bytes(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _around(subject: Any, name: str, when: str, act: Callable[[], None]) -> None:
    """Replace a method of one object by one that acts before or after it."""
    method = getattr(subject, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            act()
        result = method(*args, **kwargs)
        if when == "after":
            act()
        return result

    setattr(subject, name, replaced)


def _on_file_event(event: str, when: str, act: Callable[[], None]) -> None:
    """Act before or after each request that the system gets for a path in the run's folder. An audit hook stays for
    the life of its process."""
    here = os.path.abspath(OUTPUT_DIR)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name != event:
            return
        path, folder_fd = os.fsdecode(arguments[0]), arguments[-1]
        # Whole trees are removed by names in an open folder.
        if not os.path.abspath(path).startswith(here) and folder_fd == -1:
            return
        if when == "before":
            act()
        else:
            sys.setprofile(after)

    def after(frame: Any, name: str, argument: Any) -> None:
        """Act at the first call or return after the hook's own: the request's."""
        if frame.f_code is not hook.__code__:
            sys.setprofile(None)
            act()

    sys.addaudithook(hook)


# Counting calls ---------------------------------------------------------------------------------------------------


@dataclass
class CallCounts(TrainerCallback):
    """Counts the calls of each step and its save, as `Countdown.profile` does.

    Args:
        steps: By step, the calls from its beginning ("step") and from its save's beginning ("save") to the next step.
    """

    steps: dict[int, dict[str, int]]
    _calls: int = 0
    _at_save: int = 0
    _step: int = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note()
        self._step, self._calls = state.global_step + 1, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note()
        self._step = 0

    def _note(self) -> None:
        if self._step:
            self.steps[self._step] = {"step": self._calls, "save": self._calls - self._at_save}

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += 1


@contextmanager
def counted(trainer: Any) -> Iterator[dict[int, dict[str, int]]]:
    """Yield what CallCounts finds while the trainer trains."""
    counts = CallCounts({})

    def saving() -> None:
        counts._at_save = counts._calls

    trainer.add_callback(counts)
    _around(trainer, "_save_checkpoint", "before", saving)
    sys.setprofile(counts._profile)
    try:
        yield counts.steps
    finally:
        sys.setprofile(None)

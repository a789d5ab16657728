"""SIGTERM and Ctrl-C: a handler that records the signal, and a callback that stops all processes at the same step.

A signal may reach processes at different steps, or only some of them. So they exchange one number over a gloo group at
the end of each optimizer step, and save all or none.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from trl_ext.errors import LostProcessError
from trl_ext.monitor.streams import write_at_once
from trl_ext.rewards.rules.async_rule import end_calls

# One Ctrl-C may arrive twice, from the terminal and from the launcher, which is late on a busy machine.
SAME_PRESS_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_guards_forks = False


def saves_on_signal(args: Any) -> bool:
    """Return True if a run saves before a signal ends it; `args` may be TRL's config."""
    wish = getattr(args, "save_on_signal", None)
    if wish is None:
        return args.enable_jit_checkpoint or args.save_strategy != "no"
    return bool(wish)


def guard_forks(*, on: bool) -> None:
    """Choose whether later forks, such as a data loader's workers, leave this process's group.

    A launcher signals the whole group, and a worker that SIGTERM ends makes the training step fail.
    """
    global _guards_forks
    _guards_forks = on


def is_interactive() -> bool:
    """Return True in a notebook, in IPython and at Python's prompt."""
    ipython = sys.modules.get("IPython")  # a library may have imported it; only a shell has an instance
    is_ipython = ipython is not None and ipython.get_ipython() is not None
    return is_ipython or hasattr(sys, "ps1") or bool(sys.flags.interactive)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0) if _guards_forks else None)


class SignalNotes:
    """Records the first signal to this process, in `first` (0 before); a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.first = 0
        self._at_s = 0.0
        self._pid, self._parent = os.getpid(), os.getppid()
        self._replaced: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals that would end this process, except for handlers of the user and ignored signals.

        Does nothing outside the main thread. Ctrl-C keeps its meaning in a notebook or an interactive Python, where
        the trainer remains in memory.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        usual = {
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGINT: None if is_interactive() else signal.default_int_handler,
        }
        for number in _SIGNALS:
            if signal.getsignal(number) == usual[number]:
                self._replaced[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Restore the former handlers, once the same Ctrl-C cannot arrive again."""
        if self.first and self._replaced:
            time.sleep(max(0.0, self._at_s + SAME_PRESS_S - time.monotonic()))
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()
        end_calls(soon=False)

    def name_lost(self, error: LostProcessError) -> None:
        """Let SIGTERM print `error` before it ends this process, until it is printed or freed, also after `restore`.

        A launcher sends SIGTERM to all processes when one ends, often before they could print.
        """
        reference = weakref.ref(error)  # the error's traceback would keep the trainer in memory

        def end(number: int, frame: FrameType | None) -> None:
            lost = reference()
            if os.getpid() == self._pid and lost is not None and lost.says:
                write_at_once(f"\nerror: {lost}\n\n")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

        if self._replaced.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, end)

    def end_with(self, code: int) -> None:
        """Let a further SIGTERM end this process at once with an exit code, also after `restore`."""
        if self._replaced.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a fork, such as a data loader's worker, Ctrl-C is for the parent
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif not self.first:
            self.first, self._at_s = number, time.monotonic()
            end_calls(soon=True)
            if os.environ.get("RANK", "0") == "0":
                again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
                name = signal.Signals(number).name
                write_at_once(f"\n{name}: the run saves at the end of this optimizer step and ends{again}.\n")
        elif self._is_second(number):
            handler = self._replaced[number]
            self.restore()
            signal.signal(number, handler)
            signal.raise_signal(number)

    def _is_second(self, number: int) -> bool:
        """Return True for a second Ctrl-C, which PyTorch's launcher passes on as SIGTERM."""
        if time.monotonic() - self._at_s < SAME_PRESS_S or self.first != signal.SIGINT:
            return False
        # A launcher that Ctrl-C has ended also sends SIGTERM, which is not a second request.
        return number == signal.SIGINT or os.getppid() == self._parent


class SaveOnSignal(TrainerCallback):
    """Lets all processes save and stop at the end of the step in which any of them got a signal.

    Handlers are installed at the end of the first step: before it, there is nothing to save. `greatest` returns the
    greatest of all processes' numbers. `stopped_by` is the signal that ended training, or 0.
    """

    def __init__(self, notes: SignalNotes, greatest: Callable[[int], int]):
        self._notes, self._greatest = notes, greatest
        self._is_installed = False
        self.stopped_by = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if any process got a signal, except after the last step."""
        number = self._greatest(self._notes.first)
        if not self._is_installed:
            self._notes.install()
            self._is_installed = True
        if number and state.global_step < state.max_steps:
            self.stopped_by = number
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop as after a step, since an evaluation may take long."""
        if self._is_installed:
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the new checkpoint: transformers would delete it instead of the best if save_total_limit is 1."""
        if self.stopped_by:
            state.best_model_checkpoint = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the log, evaluation and save of an epoch's end if the epoch is not complete.

        A complete epoch's are not made up by a resumed run. The step's checkpoint is there already, in case the
        evaluation takes too long; a second save replaces it.
        """
        if self.stopped_by:
            is_complete = float(state.epoch).is_integer()
            control.should_log &= is_complete
            control.should_evaluate &= is_complete
            control.should_save = control.should_log or control.should_evaluate

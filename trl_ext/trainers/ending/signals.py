"""SIGTERM and Ctrl-C: a handler that only takes note, and a callback that lets all processes heed it in one step.

A signal reaches processes at different steps, or only some of them. So at the end of each optimizer step they exchange
one number over a group of gloo's, and all save, or none.
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
from trl_ext.rewards.rules.async_rule import end_calls

# One Ctrl-C may arrive twice: from the terminal and from the launcher.
SAME_PRESS_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_guards_forks = False


def saves_on_signal(args: Any) -> bool:
    """Return True where a run saves before a signal ends it; `args` may be a plain config of TRL's."""
    wish = getattr(args, "save_on_signal", None)
    if wish is None:
        return args.enable_jit_checkpoint or args.save_strategy != "no"
    return bool(wish)


def guard_forks(*, on: bool) -> None:
    """Let forks of this process, such as a data loader's workers, be out of reach of signals to its group, or not.

    A launcher signals the whole group of a process, and a worker that SIGTERM ends takes the step with it.
    """
    global _guards_forks
    _guards_forks = on


def is_interactive() -> bool:
    """Return True in a notebook, in IPython and at Python's own prompt."""
    ipython = sys.modules.get("IPython")  # a library may have imported it; only a shell of its own has an instance
    is_ipython = ipython is not None and ipython.get_ipython() is not None
    return is_ipython or hasattr(sys, "ps1") or bool(sys.flags.interactive)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0) if _guards_forks else None)


class SignalNotes:
    """Notes the first signal that asks this process to end; a second Ctrl-C ends it at once.

    Attributes:
        first: Number of the first signal, 0 before.
    """

    def __init__(self) -> None:
        self.first = 0
        self._at_s = 0.0
        self._pid, self._parent = os.getpid(), os.getppid()
        self._replaced: dict[int, Any] = {}

    def install(self) -> None:
        """Take over the signals that would end this process. Handlers of the user's own, and ignored signals, stay.

        Only the main thread can. In a notebook or an interactive Python Ctrl-C stays as it is: the trainer remains in
        memory there, and nothing is lost.
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
        """Give the signals back."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()
        end_calls(soon=False)

    def name_lost(self, error: LostProcessError) -> None:
        """Let SIGTERM end this process with the sentence of `error`, unless somebody has printed it by then.

        A launcher that sees one process end sends it to the others at once, often before they could speak. It stays so
        after `restore`, until the error has been dealt with.
        """
        reference = weakref.ref(error)  # no more: its traceback holds the trainer

        def end(number: int, frame: FrameType | None) -> None:
            lost = reference()
            if os.getpid() == self._pid and lost is not None and lost.says:
                os.write(2, f"\nerror: {lost}\n\n".encode())
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

        if self._replaced.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, end)

    def end_with(self, code: int) -> None:
        """Let a further SIGTERM end this process at once with an exit code, also after `restore`: all is saved."""
        if self._replaced.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # A fork, such as a data loader's worker: Ctrl-C is for its parent.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif not self.first:
            self.first, self._at_s = number, time.monotonic()
            end_calls(soon=True)
            if os.environ.get("RANK", "0") == "0":
                again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
                name = signal.Signals(number).name
                # Not print: a handler may run in the middle of one.
                os.write(2, f"\n{name}: the run saves at the end of this optimizer step and ends{again}.\n".encode())
        elif self._is_second(number):
            handler = self._replaced[number]
            self.restore()
            signal.signal(number, handler)
            signal.raise_signal(number)

    def _is_second(self, number: int) -> bool:
        """Return True for another Ctrl-C, which may come as SIGTERM: PyTorch's launcher turns the second into one."""
        if time.monotonic() - self._at_s < SAME_PRESS_S or self.first != signal.SIGINT:
            return False
        # A launcher that Ctrl-C has ended leaves SIGTERM to its processes: not a second request.
        return number == signal.SIGINT or os.getppid() == self._parent


class SaveOnSignal(TrainerCallback):
    """Lets all processes save, and stop, at the end of the step in which one of them got a signal.

    Args:
        notes: This process's, installed at the end of the first step; what comes before ends the process at once, as
            there is nothing to save.
        greatest: Gives the greatest of all processes' numbers.

    Attributes:
        stopped_by: The signal that ended training, 0 if none did.
    """

    def __init__(self, notes: SignalNotes, greatest: Callable[[int], int]):
        self._notes, self._greatest = notes, greatest
        self._is_installed = False
        self.stopped_by = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop where any process got a signal; a last step ends by itself."""
        self._heed(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As after a step: an evaluation may take longer than one."""
        if self._is_installed:
            self._heed(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what was saved: transformers deletes it for the best checkpoint's sake where only one may stay."""
        if self.stopped_by:
            state.best_model_checkpoint = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop what the end of an epoch would do: this is none."""
        if self.stopped_by:
            control.should_log = control.should_evaluate = control.should_save = False

    def _heed(self, state: Any, control: Any) -> None:
        number = self._greatest(self._notes.first)
        if not self._is_installed:
            self._notes.install()
            self._is_installed = True
        if number and state.global_step < state.max_steps:
            self.stopped_by = number
            control.should_save = control.should_training_stop = True

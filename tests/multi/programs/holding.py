"""What a test runs first in each process: process 0 waits at the places in HOLD_AT until the test lets it go on.

At "step" there is a file `step.held` in the folder HOLD_IN, and the process waits for `step.go`. A file `signalled` is
there once the process has noted a signal.
"""

import os
import time
from pathlib import Path

from transformers.trainer_callback import CallbackHandler

from trl_ext.trainers.ending.signals import SignalNotes

folder, left = Path(os.environ["HOLD_IN"]), set(os.environ["HOLD_AT"].split())
fsync, begin = os.fsync, CallbackHandler.on_train_begin
step_begin, end = CallbackHandler.on_step_begin, CallbackHandler.on_train_end
note = SignalNotes._note


def hold(place):
    if place in left and os.environ.get("RANK", "0") == "0":
        left.remove(place)
        (folder / f"{place}.held").touch()
        while not (folder / f"{place}.go").exists():
            time.sleep(0.02)


def on_train_begin(self, args, state, control):
    hold("start")
    return begin(self, args, state, control)


def on_step_begin(self, args, state, control):
    if state.global_step == 2:
        hold("step")
    return step_begin(self, args, state, control)


def on_train_end(self, args, state, control):
    hold("end")
    return end(self, args, state, control)


def note_signal(self, number, frame):
    note(self, number, frame)
    if os.environ.get("RANK", "0") == "0":
        (folder / "signalled").touch()


def confirm(file):
    hold("save")
    fsync(file)


CallbackHandler.on_train_begin, CallbackHandler.on_step_begin = on_train_begin, on_step_begin
CallbackHandler.on_train_end, os.fsync = on_train_end, confirm
SignalNotes._note = note_signal

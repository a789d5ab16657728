"""Mixed into the trainers: training saves and ends on a signal, and ends with an error if another process is lost.

Signal handlers and the watch exist only while `train` runs, in programs and in our scripts.
"""

import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from trl_ext.compat.distributed import (
    CONNECT_S,
    everyones,
    greatest,
    has_peers,
    honour_timeout,
    is_collective_error,
    meet,
    set_timeout,
    side_group,
)
from trl_ext.errors import SAVED_ON_SIGNAL, LostProcessError
from trl_ext.trainers.ending.signals import SaveOnSignal, SignalNotes, guard_forks, saves_on_signal
from trl_ext.trainers.ending.watch import Watch, rounds_of

logger = logging.get_logger(__name__)
# Errors of a write if a disk or a quota is full.
FULL = (errno.ENOSPC, errno.EDQUOT)
# How long processes wait for each other after a failed collective, to find the missing process.
NAMING_S = 10.0


class Ending(TrainerCallback):
    """Ends one call of `train`; a callback, since process groups exist only after the model is prepared."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._has_begun = False
        self._group: Any = None
        self._watch: Watch | None = None
        self._notes = SignalNotes()
        self._save_on_signal: SaveOnSignal | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the watch and the handling of signals."""
        if self._has_begun:  # transformers begins again while it searches for a batch size
            return
        self._has_begun = True
        honour_timeout(args.ddp_timeout)  # also for groups that came with the prepared model
        if has_peers():
            self._start_watch(args)
        if saves_on_signal(args):
            guard_forks(on=True)
            self._save_on_signal = SaveOnSignal(self._notes, self._greatest)
            self._trainer.add_callback(self._save_on_signal)

    def _start_watch(self, args: Any) -> None:
        rank = self._trainer.accelerator.process_index
        *_, patience_s = rounds_of(args.ddp_timeout)
        try:
            self._group = side_group(min(CONNECT_S, args.ddp_timeout))
            group = side_group(patience_s)
        except RuntimeError as error:
            # For example on machines whose name resolves to 127.0.0.1, while training uses other addresses.
            self._group = None
            logger.warning(
                f"Processes do not watch each other: gloo cannot connect them ({error}). Name the network interface "
                "between the machines in GLOO_SOCKET_IFNAME."
            )
            return
        set_timeout(self._group, args.ddp_timeout)
        places = everyones(f"machine {socket.gethostname()}, process id {os.getpid()}", self._group)
        self._watch = Watch(group, places, rank, args.ddp_timeout)
        self._watch.start()

    def _greatest(self, number: int) -> int:
        if self._group is not None:
            return greatest(number, self._group)
        return int(max(gather_object([number])))

    def finish(self) -> None:
        """End the watch on all processes together; raise SystemExit if a signal has ended training."""
        if self._watch is not None:
            self._watch.stop_after(greatest(self._watch.hold(), self._group))
            self._watch = None
        stopped_by = self._save_on_signal.stopped_by if self._save_on_signal is not None else 0
        if not stopped_by:
            return
        trainer = self._trainer
        folder = Path(str(trainer.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        is_main = trainer.is_world_process_zero()
        is_missing = self._greatest(int(is_main and not folder.is_dir()))
        if is_main:
            name = signal.Signals(stopped_by).name
            words = (
                f"No checkpoint could be written after {name}; {folder} is not there, only what was saved before."
                if is_missing
                else f"Saved {folder} after {name}. Go on with --resume_from_checkpoint true."
            )
            print(f"\n{words}\n", file=sys.stderr, flush=True)
        self._notes.end_with(1 if is_missing else SAVED_ON_SIGNAL)
        raise SystemExit(1 if is_missing else SAVED_ON_SIGNAL)

    def lost(self, error: BaseException) -> LostProcessError | None:
        """Return an error that names the process that is missing in a failed collective; None if none is."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        lost = None
        if is_collective_error(error):
            try:
                meet(self._group, NAMING_S)
            except RuntimeError as problem:
                lost = watch.lost(problem, self._group, getattr(self._trainer, "doing", ""))
        if lost is not None:
            self._notes.name_lost(lost)
        watch.leave()
        return lost

    def clean(self) -> None:
        """Remove handlers and callbacks."""
        self._notes.restore()
        guard_forks(on=False)
        if self._watch is not None:
            self._watch.leave()
        self._trainer.pop_callback(self)
        if self._save_on_signal is not None:
            self._trainer.pop_callback(self._save_on_signal)


@contextmanager
def ended(trainer: Trainer) -> Iterator[None]:
    """Save the training inside the block on SIGTERM and Ctrl-C, and end it when a process is lost.

    Raises:
        SystemExit: with code 75 after SIGTERM or Ctrl-C, if all processes have saved; else with code 1.
        LostProcessError: another process does not answer, or has ended.
    """
    ending = Ending(trainer)
    trainer.add_callback(ending)
    try:
        yield
        ending.finish()
    except Exception as error:
        if lost := ending.lost(error):
            raise lost from error
        raise
    finally:
        ending.clean()


class RunEnds(Trainer):
    """Mixed into a trainer: our handler of SIGTERM, and no end of training when logging meets a full disk."""

    _metrics: Any  # TRL's: lists by name for "train" and "eval"
    _step_of_full_disk: int | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        """Overrides transformers.Trainer.__init__: removes its handler of SIGTERM, as ours replaces it."""
        super().__init__(*args, **kwargs)
        just_in_time: Any = self.pop_callback(JITCheckpointCallback)
        if just_in_time is not None and just_in_time.jit_manager is not None:
            signal.signal(signal.SIGTERM, just_in_time.jit_manager._original_sigterm_handler)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides transformers.Trainer.log: a full disk gives a warning per step and does not end training, as the
        numbers stay in `state.log_history`, and so reach checkpoints and the report."""
        mode = "train" if self.model.training else "eval"  # type: ignore[union-attr]
        try:
            super().log(logs, start_time)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._metrics[mode].clear()  # the last line of TRL's `log`, which the error may have skipped
            if self._step_of_full_disk != self.state.global_step:
                self._step_of_full_disk = self.state.global_step
                logger.warning(f"Step {self.state.global_step}: what is logged could not be written: {error}.")

"""Mixed into the trainers: training saves and ends on a signal, and ends with an error if another process is lost.

Signal handlers and the watch exist only while `train` runs, in programs and in our scripts.
"""

import atexit
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from trl_ext.compat.distributed import (
    CONNECT_S,
    everyones,
    greatest,
    has_hung_up,
    has_peers,
    honour_timeout,
    is_collective_error,
    meet,
    missing_ranks,
    set_timeout,
    side_group,
)
from trl_ext.errors import LOST_PROCESS, SAVED_ON_SIGNAL, LostProcessError
from trl_ext.trainers.ending.signals import SaveOnSignal, SignalNotes, guard_forks, saves_on_signal

logger = logging.get_logger(__name__)
# Errors of a write if a disk or a quota is full.
FULL = (errno.ENOSPC, errno.EDQUOT)
# How long processes wait for each other after a failed collective, to find the missing process.
NAMING_S = 10.0
# Time for the main thread to fail by itself after a closed connection, with a better message.
GRACE_S = 10.0


class Rounds(NamedTuple):
    """Times of a watch, in seconds; a pause and a wait together stay below the timeout."""

    pause_s: float  # between barriers
    wait_s: float  # of process 0 in a barrier: it gives up first, as only it can find who is missing
    others_wait_s: float  # of the other processes in a barrier


def rounds_of(timeout_s: float) -> Rounds:
    """Return the times of a watch that finds a lost process within `timeout_s`."""
    pause_s, margin_s = min(10.0, timeout_s / 10), min(10.0, timeout_s / 5)
    return Rounds(pause_s, timeout_s - pause_s - 2 * margin_s, timeout_s - pause_s - margin_s)


class Watch:
    """Enters a barrier with the other processes, again and again, until it is stopped.

    A collective that waits for a lost process reports nothing until its timeout, blocks the interpreter on GPUs, and
    names no process in its error. So every few seconds a thread of each process enters PyTorch's monitored barrier,
    over a separate group. It never waits for training, and training never waits for it.

    Args:
        group: From `side_group`, with `others_wait_s` of `rounds_of` as timeout.
        places: Host and process id of each process, in words, by rank.
        timeout_s: Time within which a lost process is found.
    """

    def __init__(self, group: Any, places: Sequence[str], rank: int, timeout_s: float):
        self._group, self._places, self._rank = group, places, rank
        self._rounds = rounds_of(timeout_s)
        self._changed = threading.Condition()
        self._num_begun = 0
        self._last: int | None = None  # number of the last barrier, once all have agreed on it
        self._is_held = False
        self._has_left = threading.Event()  # set when the main thread is out of the training loop
        self._thread = threading.Thread(target=self._run, name="watch of the other processes", daemon=True)

    def start(self) -> None:
        """Begin to watch, on all processes."""
        self._thread.start()
        # A thread that is still in a barrier while Python exits would abort the process.
        atexit.register(self._thread.join, GRACE_S)

    def hold(self) -> int:
        """Pause before the next barrier, and return the number of barriers so far."""
        with self._changed:
            self._is_held = True
            return self._num_begun

    def stop_after(self, num_rounds: int) -> None:
        """Stop after `num_rounds` barriers, the greatest number that `hold` returned on any process."""
        with self._changed:
            self._last, self._is_held = num_rounds, False
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self._thread.join)

    def leave(self) -> None:
        """Stop watching, as an error in the main thread ends the run."""
        self._has_left.set()
        with self._changed:
            self._last, self._is_held = self._num_begun, False
            self._changed.notify()

    def lost(self, error: Exception, group: Any, doing: str = "") -> LostProcessError | None:
        """Return an error that names the processes missing in a barrier of `group` and the current work, `doing`.

        None if the processes are not known.
        """
        ranks = missing_ranks(error, group)
        if not ranks:
            return None
        who = " and ".join(f"process {rank} ({self._places[rank]})" for rank in ranks)
        many = len(ranks) > 1
        if has_hung_up(error):
            what = f"{'have' if many else 'has'} ended; {'their' if many else 'its'} own output has the reason"
        else:
            what = f"{'do' if many else 'does'} not answer: stopped, stuck or cut off from the network"
        sentence = f"{who[0].upper()}{who[1:]} {what}. {doing}Start again with --resume_from_checkpoint true."
        # One process prints the error; if process 0 is lost, one process of each machine.
        says = self._rank <= 1 or os.environ.get("LOCAL_RANK") == "0"
        return LostProcessError(sentence, says=says, has_ended=has_hung_up(error))

    def _run(self) -> None:
        while True:
            with self._changed:  # wait until the next barrier is due
                self._changed.wait_for(lambda: self._last is not None, self._rounds.pause_s)
                self._changed.wait_for(lambda: not self._is_held)
                if self._last is not None and self._num_begun >= self._last:
                    return
                self._num_begun += 1
            try:
                meet(self._group, self._rounds.wait_s)
            except RuntimeError as error:
                self._end(error)
                return

    def _end(self, error: RuntimeError) -> None:
        """End this process, unless the main thread ends it."""
        if self._has_left.is_set() or (has_hung_up(error) and self._has_left.wait(GRACE_S)):
            return
        lost = self.lost(error, self._group)
        text = str(lost or f"A process is lost: {error}")
        if lost is None or lost.says:
            print(f"\nerror: {text}\n", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(LOST_PROCESS)  # the main thread may hang in a collective


class Ending(TrainerCallback):
    """Ends one call of `train`; a callback, since process groups exist only after the model is prepared."""

    def __init__(self, trainer: "RunEnds"):
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
        try:
            self._group = side_group(min(CONNECT_S, args.ddp_timeout))
            group = side_group(rounds_of(args.ddp_timeout).others_wait_s)
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

    def clean(self, *, keeps_handlers: bool) -> None:
        """Remove callbacks, and handlers of signals unless the trainer keeps them until its `end_signals`."""
        if keeps_handlers:
            self._trainer.signal_notes = self._notes
        else:
            self._notes.restore()
        guard_forks(on=False)
        if self._watch is not None:
            self._watch.leave()
        self._trainer.pop_callback(self)
        if self._save_on_signal is not None:
            self._trainer.pop_callback(self._save_on_signal)


@contextmanager
def ended(trainer: "RunEnds") -> Iterator[None]:
    """Save the training inside the block on SIGTERM and Ctrl-C, and end it when a process is lost.

    Raises:
        SystemExit: with code 75 after SIGTERM or Ctrl-C, if all processes have saved; else with code 1.
        LostProcessError: another process does not answer, or has ended.
    """
    ending = Ending(trainer)
    trainer.add_callback(ending)
    is_whole = False
    try:
        yield
        ending.finish()
        is_whole = True
    except Exception as error:
        if lost := ending.lost(error):
            raise lost from error
        raise
    finally:
        ending.clean(keeps_handlers=is_whole and trainer.saves_afterwards)


class RunEnds(Trainer):
    """Mixed into a trainer: our handler of SIGTERM, and no end of training when logging meets a full disk."""

    saves_afterwards = False  # True if the caller of `train` saves the model next, and then calls `end_signals`
    signal_notes: SignalNotes | None = None
    _metrics: Any  # TRL's: lists by name for "train" and "eval"
    _step_of_full_disk: int | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        """Overrides transformers.Trainer.__init__: removes its handler of SIGTERM, as ours replaces it."""
        super().__init__(*args, **kwargs)
        just_in_time: Any = self.pop_callback(JITCheckpointCallback)
        if just_in_time is not None and just_in_time.jit_manager is not None:
            signal.signal(signal.SIGTERM, just_in_time.jit_manager._original_sigterm_handler)

    def end_signals(self) -> None:
        """Restore the handlers of signals that a whole `train` kept for the caller's save."""
        if self.signal_notes is not None:
            self.signal_notes.restore()
            self.signal_notes = None

    def _determine_best_metric(self, *args: Any, **options: Any) -> bool:
        """Overrides transformers.Trainer._determine_best_metric: with `save_strategy: best` a save after an evaluation
        that a callback asks for, as after a signal, takes place even if the metric is not the best."""
        return super()._determine_best_metric(*args, **options) or self.control.should_save

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

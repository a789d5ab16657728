"""A watch over the other processes during training: a stopped, dead or cut off process is named, and the run ends.

A collective that waits for a lost process reports nothing until its timeout, blocks the interpreter on GPUs, and names
no process in its error. So every few seconds a thread of each process enters PyTorch's monitored barrier, over a
separate group. It never waits for training, and training never waits for it.
"""

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from trl_ext.compat.distributed import has_hung_up, meet, missing_ranks
from trl_ext.errors import LOST_PROCESS, LostProcessError

# Time for the main thread to fail by itself after a closed connection, with a better message.
GRACE_S = 10.0


def rounds_of(timeout_s: float) -> tuple[float, float, float]:
    """Return the seconds between barriers, the seconds that process 0 waits in a barrier, and that others wait.

    Together they stay below `timeout_s`. Process 0 gives up first, as only it can find who is missing.
    """
    pause_s, margin_s = min(10.0, timeout_s / 10), min(10.0, timeout_s / 5)
    return pause_s, timeout_s - pause_s - 2 * margin_s, timeout_s - pause_s - margin_s


class Watch:
    """Enters a barrier with the other processes, again and again, until it is stopped.

    Args:
        group: From `side_group`, with the last value of `rounds_of` as timeout.
        places: Host and process id of each process, in words, by rank.
        timeout_s: Time within which a lost process is found.
    """

    def __init__(self, group: Any, places: Sequence[str], rank: int, timeout_s: float):
        self._group, self._places, self._rank = group, places, rank
        self._pause_s, self._patience_s, _ = rounds_of(timeout_s)
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
        while self._may_begin():
            try:
                meet(self._group, self._patience_s)
            except RuntimeError as error:
                self._end(error)
                return

    def _may_begin(self) -> bool:
        """Wait until the next barrier is due; return False after the last barrier."""
        with self._changed:
            self._changed.wait_for(lambda: self._last is not None, self._pause_s)
            self._changed.wait_for(lambda: not self._is_held)
            if self._last is not None and self._num_begun >= self._last:
                return False
            self._num_begun += 1
            return True

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

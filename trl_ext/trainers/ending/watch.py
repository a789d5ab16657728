"""Each process watches the others while it trains: one that is stopped, dead or cut off is named, and the run ends.

A collective that waits for a lost process says nothing until its timeout, on GPUs it blocks the interpreter, and what
it says in the end names nobody. So a thread of each process meets those of the others in PyTorch's monitored barrier,
every few seconds and over a group of its own. It never waits for training, and training never waits for it.
"""

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from trl_ext.compat.distributed import has_hung_up, meet, missing_ranks
from trl_ext.errors import LOST_PROCESS, LostProcessError

# How long the main thread may take to fail by itself where a connection was closed: its own message says more.
GRACE_S = 10.0


def rounds_of(timeout_s: float) -> tuple[float, float, float]:
    """Seconds between two barriers, seconds that process 0 waits in one, and seconds that the others wait.

    Together they stay below `timeout_s`. Process 0 gives up first: it is the one that can tell who is missing.
    """
    pause_s, margin_s = min(10.0, timeout_s / 10), min(10.0, timeout_s / 5)
    return pause_s, timeout_s - pause_s - 2 * margin_s, timeout_s - pause_s - margin_s


class Watch:
    """Meets the other processes until told to stop.

    Args:
        group: From `side_group`, with the last of `rounds_of` as timeout.
        places: Host and process id of each process, in words, by rank.
        rank: This process's.
        timeout_s: Within which a lost process is found.
    """

    def __init__(self, group: Any, places: Sequence[str], rank: int, timeout_s: float):
        self._group, self._places, self._rank = group, places, rank
        self._pause_s, self._patience_s, _ = rounds_of(timeout_s)
        self._changed = threading.Condition()
        self._num_begun = 0
        self._last: int | None = None  # the round after which all stop, once they have agreed on it
        self._is_held = False
        self._has_left = threading.Event()  # the main thread is out of the training loop
        self._thread = threading.Thread(target=self._run, name="watch of the other processes", daemon=True)

    def start(self) -> None:
        """Begin to watch. All processes do so."""
        self._thread.start()
        # Where an error ends the process: a thread that is still in a barrier while Python goes down aborts it.
        atexit.register(self._thread.join, GRACE_S)

    def hold(self) -> int:
        """Begin no further barrier, and return how many were begun."""
        with self._changed:
            self._is_held = True
            return self._num_begun

    def stop_after(self, num_rounds: int) -> None:
        """Meet until `num_rounds`, the greatest of what `hold` returned on all processes, and stop."""
        with self._changed:
            self._last, self._is_held = num_rounds, False
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self._thread.join)

    def leave(self) -> None:
        """Stop to care: the main thread has an error of its own, which ends the run."""
        self._has_left.set()
        with self._changed:
            self._last, self._is_held = self._num_begun, False
            self._changed.notify()

    def lost(self, error: Exception, group: Any, doing: str = "") -> LostProcessError | None:
        """Return the error that names who did not come to a barrier of `group`; None if it cannot be told.

        `doing`: a sentence about what the processes were busy with.
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
        # One process tells of another, and of process 0 one process of each machine.
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
        """Wait until the next round is due; False after the last one."""
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
        os._exit(LOST_PROCESS)  # the main thread may be in a collective from which nothing wakes it

"""Reward training that would go on for long, told to end by a test; leaves its process id behind.

Its disk confirms nothing while there is a file `hang-<rank>`. With a file `late` a process that has lost another takes
long from the end of training to its last words, as on a busy machine.
"""

import os
import sys
import time
from pathlib import Path

from trl_ext import RewardTrainer
from trl_ext.errors import LostProcessError
from trl_ext.scripts import reward

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rank, fsync = os.environ.get("RANK", "0"), os.fsync
    folder.joinpath(f"{rank}.pid").write_text(str(os.getpid()))

    def hanging(file):
        while (folder / f"hang-{rank}").exists():
            time.sleep(0.1)
        fsync(file)

    def late(self, *args, **kwargs):
        try:
            return train(self, *args, **kwargs)
        except LostProcessError:
            time.sleep(5)  # the launcher sends SIGTERM sooner
            raise

    os.fsync = hanging
    if (folder / "late").exists():
        train, RewardTrainer.train = RewardTrainer.train, late
    reward.main(sys.argv[2:])

"""Reward training that would go on for long, told to end by a test; leaves its process id behind.

Its disk confirms nothing while there is a file `hang-<rank>`.
"""

import os
import sys
import time
from pathlib import Path

from trl_ext.scripts import reward

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rank, fsync = os.environ.get("RANK", "0"), os.fsync
    folder.joinpath(f"{rank}.pid").write_text(str(os.getpid()))

    def hanging(file):
        while (folder / f"hang-{rank}").exists():
            time.sleep(0.1)
        fsync(file)

    os.fsync = hanging
    reward.main(sys.argv[2:])

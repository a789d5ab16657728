"""Reward training that would go on for long, told to end by a test; leaves its process id behind."""

import os
import sys
from pathlib import Path

from trl_ext.scripts import reward

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.joinpath(f"{os.environ.get('RANK', '0')}.pid").write_text(str(os.getpid()))
    reward.main(sys.argv[2:])

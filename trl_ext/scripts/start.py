"""What a process does first where a launcher has started it: it will not outlive the launcher.

Only the scripts do so. A notebook, or a program of the user's own, decides itself what it outlives.
"""

import os
import signal
import sys
from pathlib import Path

from trl_ext.rewards.isolation.kernel import die_with_parent

# Programs, and modules behind `python -m`, that start processes and wait for them.
LAUNCHERS = frozenset(
    "accelerate accelerate-launch deepspeed torchrun trl-ext accelerate.commands.launch deepspeed.launcher.launch "
    "torch.distributed.launch torch.distributed.run trl_ext.cli.main".split()
)


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher ends, however it does; does nothing where none started this process, or no Linux.

    SIGTERM and not SIGKILL: once a step is done, the run saves what it has.
    """
    if sys.platform == "linux" and is_launcher(parent := os.getppid()):
        die_with_parent(parent, signal.SIGTERM)


def is_launcher(pid: int) -> bool:
    """Return True for a process whose command line names a launcher."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # As many words as `/usr/bin/python3 -u -m accelerate.commands.launch`: further ones are for the launcher.
    return any(Path(word).name in LAUNCHERS for word in words[:4])

"""What the processes of a run tell each other around a checkpoint: small Python objects, in the order of ranks."""

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

# How long a network file system may take to show one machine what another has written.
_PATIENCE_S = 3.0


def gathered(args: Any, mine: Any) -> list[Any]:
    """Return this object of every process. Collective; nobody goes on before all have come.

    Args:
        args: Training arguments, which know how many processes there are.
        mine: This process's.
    """
    return gather_object([mine]) if args.world_size > 1 else [mine]


def of_rank_0(args: Any, mine: Any) -> Any:
    """Return process 0's object on every process. Collective; arguments as of `gathered`."""
    if args.world_size == 1:
        return mine
    objects = [mine]
    broadcast_object_list(objects, from_process=0)
    return objects[0]


def see_folder(args: Any, folder: Path) -> list[bool]:
    """Return for every process whether it sees what process 0 writes into a folder. Collective.

    Args:
        args: Training arguments.
        folder: Each process's own; it is made.
    """
    # A new name, so that no network file system knows from before that it does not exist.
    token = folder / of_rank_0(args, f"_{secrets.token_hex(8)}")
    if args.process_index == 0:
        with suppress(OSError):  # where it cannot write, saving says so
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
    written = of_rank_0(args, token.exists())
    deadline_s = time.monotonic() + _PATIENCE_S
    while written and not token.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    found = gathered(args, token.exists() or not written)
    if args.process_index == 0:
        token.unlink(missing_ok=True)
    return found

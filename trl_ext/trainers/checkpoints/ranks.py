"""Exchange of small Python objects between the processes of a run around a checkpoint."""

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

# Time until a network file system shows a machine what another has written.
_PATIENCE_S = 3.0


def gathered(args: Any, mine: Any) -> list[Any]:
    """Return the objects `mine` of all processes, by rank. Collective; `args` are training arguments."""
    return gather_object([mine]) if args.world_size > 1 else [mine]


def of_rank_0(args: Any, mine: Any) -> Any:
    """Return process 0's object on every process. Collective."""
    if args.world_size == 1:
        return mine
    objects = [mine]
    broadcast_object_list(objects, from_process=0)
    return objects[0]


def see_folder(args: Any, folder: Path) -> list[bool]:
    """Return, by rank, True if the process sees what process 0 writes into `folder`, which is made. Collective."""
    # A new name: a network file system may cache that an old name does not exist.
    token = folder / of_rank_0(args, f"_{secrets.token_hex(8)}")
    if args.process_index == 0:
        with suppress(OSError):  # saving raises the error if it cannot write
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

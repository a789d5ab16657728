"""What the processes of a run tell each other around a checkpoint: small Python objects, in the order of ranks."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object


def gathered(trainer: Any, mine: Any) -> list[Any]:
    """Return this object of every process. Collective; nobody goes on before all have come."""
    return gather_object([mine]) if trainer.args.world_size > 1 else [mine]


def of_rank_0(trainer: Any, mine: Any) -> Any:
    """Return process 0's object on every process. Collective."""
    if trainer.args.world_size == 1:
        return mine
    objects = [mine]
    broadcast_object_list(objects, from_process=0)
    return objects[0]


def leaders(trainer: Any, folder: Path) -> list[int]:
    """Return for every process the first one that sees the same folder. Collective.

    Each process writes a file and looks for those of the others. The names are new, so that no network file system
    knows from before that they do not exist.

    Args:
        trainer: The trainer.
        folder: Where to look; it is made.
    """
    if trainer.args.world_size == 1:
        return [0]
    token, rank = of_rank_0(trainer, secrets.token_hex(8)), trainer.args.process_index
    names = [folder / f"{token}-{other}" for other in range(trainer.args.world_size)]
    with suppress(OSError):  # where it cannot write, saving says so
        folder.mkdir(parents=True, exist_ok=True)
        names[rank].touch()
    gathered(trainer, None)
    seen = next((other for other, name in enumerate(names) if os.path.exists(name)), rank)
    found = gathered(trainer, seen)
    with suppress(OSError):
        names[rank].unlink()
    return found

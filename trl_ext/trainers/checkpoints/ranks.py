"""Exchange of small Python objects between the processes of a run around a checkpoint."""

from typing import Any

from accelerate.utils import broadcast_object_list, gather_object


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

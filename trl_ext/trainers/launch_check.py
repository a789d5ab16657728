"""A launcher that started several processes which do not know of each other trains several models, silently."""

import os
from typing import Any

from trl_ext.errors import ConfigError


def check_launch(args: Any) -> None:
    """Raise ConfigError unless the processes that the launcher started work together.

    Args:
        args: Training arguments; `world_size` is what the trainer believes, WORLD_SIZE what the launcher did.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started < 1:
        raise ConfigError(f"WORLD_SIZE={started} is fewer than one process. Launch with --num_processes 1 or more.")
    # Clusters set WORLD_SIZE for whole jobs; a launcher sets LOCAL_RANK beside it.
    if "LOCAL_RANK" in os.environ and args.world_size != started:
        raise ConfigError(
            f"The launcher started {started} processes, but each believes in a world of {args.world_size} and would "
            "train a model of its own. Without GPUs, set use_cpu: true in the recipe (or --use_cpu)."
        )

"""The setting `sequence_parallel`: which runs can share rows between processes."""

import os
from collections.abc import Sequence
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.packing.families.rope import kinds_of
from trl_ext.packing.families.state import carries_state


def size_of_groups(args: Any) -> int:
    """Return how many processes share each row; 1 for a plain TRL config."""
    return getattr(args, "sequence_parallel", 1)


def check_other_ways(config: Any) -> None:
    """Raise ConfigError if accelerate is set to share rows, which these losses do not support."""
    from_launcher = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    for name in ("sp_size", "cp_size"):
        launched = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if from_launcher else "1"
        size = max(getattr(config.parallelism_config, name, 1) or 1, int(launched))
        if size > 1:
            raise ConfigError(
                f"parallelism_config has {name}={size}, which shares rows in a way that these losses do not know. "
                f"Leave it out and set sequence_parallel={size}."
            )


def check_processes(args: Any) -> None:
    """Raise ConfigError unless the processes of this run form groups whose members can share a model's rows."""
    size, count = size_of_groups(args), args.world_size
    if count % size:
        number = "1 process" if count == 1 else f"{count} processes"
        raise ConfigError(
            f"{number} cannot be cut into groups of sequence_parallel={size}. Launch a multiple of {size} processes, "
            f"or set sequence_parallel to a divisor of {count}."
        )


def check_models(models: Sequence[Any], size: int) -> None:
    """Raise ConfigError if `size` processes cannot share the rows of one of the unwrapped transformers models."""
    for config in [model.config.get_text_config() for model in models] if size > 1 else ():
        name = config._name_or_path or config.model_type
        if carries_state(config):
            raise ConfigError(
                f"{name} has layers that carry state along the row, and a process would carry it along its part only. "
                f"Leave sequence_parallel={size} out."
            )
        for kind in kinds_of(config):  # a process with a part of a row does not know the length of the whole row
            raise ConfigError(
                f"{name} has positions of type {kind}, which depend on the length of the whole row. Leave "
                f"sequence_parallel={size} out."
            )

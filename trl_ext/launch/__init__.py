"""Start a script in several processes: through accelerate on this machine, or as workers of Ray Train.

`ray` is for notebooks; `trl-ext grpo --launcher ray` does the same in a shell.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from trl_ext.errors import ConfigError

LAUNCHERS = {"accelerate": "trl_ext.launch.accelerate", "ray": "trl_ext.launch.ray_train"}


def split_launcher(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Remove `--launcher NAME`; return the name, "accelerate" by default, and the other words."""
    words: list[str] = []
    name = "accelerate"
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag == "--launcher":
            name = value if equals else next(rest, "")
        else:
            words.append(word)
    if name not in LAUNCHERS:
        raise ConfigError(f"--launcher is {name or 'empty'}. There are: {', '.join(LAUNCHERS)}.")
    return name, words


def ray(trainer: str, *, launch_file: str | None = None, **settings: Any) -> Any:
    """Train as workers of Ray Train, from a notebook or a program. The cluster keeps running.

    Args:
        trainer: "grpo", "ppo" or "reward".
        launch_file: An accelerate file, or the name of a shipped file such as "zero2".
        settings: Keys of a recipe, `config` for a recipe, and `num_workers`, `resources_per_worker`, `address`,
            `storage_path`, `max_failures`, `autoscaling`, as on the command line.

    Returns:
        Ray's `Result`: `metrics`, `checkpoint`, and `return_value`, the exit code of the script, 0 for a complete run.

    Raises:
        ConfigError, DataError, SupportError: The run could not start.
        ray.train.TrainingFailedError: It failed more than `max_failures` times.
    """
    import yaml

    module = import_module(f"trl_ext.scripts.{trainer}")
    named = {**settings, **({} if launch_file is None else {"config_file": launch_file})}
    words = {
        key: yaml.safe_dump(value, default_flow_style=True).strip() if isinstance(value, dict | list) else str(value)
        for key, value in named.items()
    }
    argv = [word for key, value in words.items() for word in (f"--{key}", value)]
    return import_module(LAUNCHERS["ray"]).fit(module.__name__, module.make_parser(), argv)

"""Start a script in several processes: through accelerate on this machine, or as workers of Ray Train.

`ray` is for notebooks; `trl-ext grpo --launcher ray` does the same from a shell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError

if TYPE_CHECKING:
    from trl_ext.scripts.arguments import StrictParser

LAUNCHERS = {"accelerate": "trl_ext.launch.accelerate", "ray": "trl_ext.launch.ray_train"}


@dataclass(frozen=True)
class Launcher:
    """A module of `LAUNCHERS`, loaded when it is needed."""

    module: str

    def of_script(self, argv: Sequence[str]) -> list[str]:
        """Return what is the script's or `accelerate launch`'s of a command line."""
        return list(import_module(self.module).split(argv)[1]) if self.module.endswith("ray_train") else list(argv)

    def launch(self, module: str, parser: "StrictParser", argv: Sequence[str]) -> int:
        """Run a script, wait for it, and return its exit code."""
        code: int = import_module(self.module).launch(module, parser, argv)
        return code


def split_launcher(argv: Sequence[str]) -> tuple[Launcher, list[str]]:
    """Take `--launcher NAME` out of a command line, and return that launcher, accelerate if none is named.

    Raises:
        ConfigError: There is no such launcher.
    """
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
    return Launcher(LAUNCHERS[name]), words


def ray(trainer: str, *, launch_file: str | None = None, **settings: Any) -> Any:
    """Train as workers of Ray Train, from a notebook or a program; the cluster is left as it is afterwards.

    Args:
        trainer: "grpo", "ppo" or "reward".
        launch_file: An accelerate file, or the name of a shipped one, such as "zero2".
        settings: Keys of a recipe, `config` for a recipe, and `num_workers`, `resources_per_worker`, `address`,
            `storage_path`, `max_failures`, as on the command line.

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

"""Shipped files: the version, and YAML and JSON files by name, in an installed wheel and in a checkout."""

from difflib import get_close_matches
from pathlib import Path

from trl_ext.errors import ConfigError

__version__ = "0.2.0"  # the build reads it here

PACKAGE = Path(__file__).resolve().parent


def accelerate_config(name: str) -> Path:
    """Return the file for `accelerate launch --config_file`, such as "zero2"."""
    return _named(name, accelerate_configs())


def accelerate_configs() -> list[Path]:
    """Return all files for `accelerate launch --config_file`."""
    return _shipped("accelerate_configs", ".yaml")


def deepspeed_config(name: str) -> Path:
    """Return the file for `--deepspeed`, such as "zero3_offload"."""
    return _named(name, _shipped("deepspeed_configs", ".json"))


def recipe(name: str) -> Path:
    """Return the file for `--config`, such as "quickstart"."""
    return _named(name, recipes())


def recipes() -> list[Path]:
    """Return all files for `--config`."""
    return _shipped("recipes", ".yaml")


def _named(name: str, paths: list[Path]) -> Path:
    shipped = {path.stem: path for path in paths}
    if name in shipped:
        return shipped[name]
    folder, nearest = paths[0].parent.name, get_close_matches(name, shipped, n=1, cutoff=0.0)[0]
    raise ConfigError(f"'{name}' is not in {folder}. Use one of {', '.join(shipped)}; the nearest is '{nearest}'.")


def _shipped(folder: str, suffix: str) -> list[Path]:
    # A wheel has the folders inside the package; a checkout and an editable install have them next to it.
    for parent in (PACKAGE, PACKAGE.parent):
        paths = sorted((parent / folder).glob(f"*{suffix}"))
        if paths:
            return paths
    raise ConfigError(
        f"There is no {folder} folder with {suffix} files in {PACKAGE} or next to it. Install trl-ext again."
    )

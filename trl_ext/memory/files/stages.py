"""Staged runs: a smoke run of minutes, a pilot, then the full run, with one set of memory settings.

The smoke run meets the worst case of memory at once, and the second optimizer step, in which Adam's state is there.
The pilot shows whether reward or accuracy moves. Each stage is worth starting when the one before it ended well.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Args:
        name: Also of its recipe: recipe_smoke.yaml.
        shows: What it is for, and when to go on.
        keys: Over those of the plan's recipe.
    """

    name: str
    shows: str
    keys: dict[str, Any]


STAGES = (
    Stage(
        "smoke",
        "3 optimizer steps. Go on if it ends: memory, data and rewards work.",
        {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 1},
    ),
    Stage(
        "pilot",
        "60 optimizer steps. Go on if the reward, or the accuracy on pairs, rises.",
        {"max_steps": 60, "save_strategy": "steps", "save_steps": 60, "logging_steps": 1},
    ),
)


def write_stages(folder: str | Path) -> list[Path]:
    """Recipes for the stages before the full run, beside the plan's recipe.yaml.

    Raises:
        ConfigError: There is no recipe.yaml in the folder.
    """
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise ConfigError(f"There is no recipe.yaml in {folder} to make stages of. Write the plan first: --write.")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    return [_write_stage(folder, stage, recipe) for stage in STAGES]


def _write_stage(folder: Path, stage: Stage, recipe: dict[str, Any]) -> Path:
    file = folder / f"recipe_{stage.name}.yaml"
    keys = yaml.safe_dump({**recipe, **stage.keys}, sort_keys=False, width=119)
    file.write_text(f"# {stage.shows}\n{keys}", encoding="utf-8")
    return file

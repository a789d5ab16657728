"""Eight named jobs for common cases, which the planner answers when asked.

All numbers are estimated. Options after `--preset` change the job's lengths and batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.planner.planner import Plan, plan
from trl_ext.memory.tables import read_table


@dataclass(frozen=True, slots=True)
class Preset:
    """A question to the planner.

    Args:
        purpose: The run that it suits, in a sentence.
        trainer: "grpo", "ppo" or "reward".
        model, gpus: As `plan` takes them, such as 7B and 4xA100-80GB.
        settings: Fields of `Job` that stay; the planner chooses the others.
    """

    purpose: str
    trainer: str
    model: str
    gpus: str
    settings: Mapping[str, Any]

    def plan(self) -> Plan:
        """Return the planner's best answer."""
        return plan(self.trainer, self.model, self.gpus, **self.settings).best


PRESETS: dict[str, Preset] = {name: Preset(**fields) for name, fields in read_table("presets").items()}


def preset(name: str) -> Preset:
    """Return a preset; raise ConfigError with the nearest names if there is none.

    Args:
        name: A name in `PRESETS`.
    """
    if name not in PRESETS:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.3) or list(PRESETS)[:3]
        raise ConfigError(f"There is no preset '{name}'. Nearest: {', '.join(near)}.")
    return PRESETS[name]

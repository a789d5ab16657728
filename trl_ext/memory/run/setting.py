"""The value of a config's `memory`: this machine's cards, cards by name, a preset, or a plan in a folder."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, HEADROOM_FRAC, Hardware, parse_gpus
from trl_ext.memory.files.plan import read_plan
from trl_ext.memory.job import Job
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.planner.presets import PRESETS, preset

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """The machine to plan for, and the plan if it is a frozen one.

    Args:
        name: As the user wrote it.
        hardware: The cards; None for those of this machine.
        job: The frozen plan's; None where the settings are to be searched.
        headroom_frac: Share of a card that stays free; None for that of the cards, or of the frozen plan.
    """

    name: str
    hardware: Hardware | None = None
    job: Job | None = None
    headroom_frac: float | None = None

    @property
    def kept_free_frac(self) -> float:
        """Share of a card that stays free."""
        planned = self.hardware.headroom_frac if self.hardware else HEADROOM_FRAC
        return planned if self.headroom_frac is None else self.headroom_frac


def parse_memory(memory: Any) -> MemorySetting:
    """Parse the value of `memory`.

    Args:
        memory: "auto", cards ("4xA40-48GB"), a preset's name, a plan's folder or plan.json, or a `Plan`.

    Raises:
        ConfigError: It names nothing, with the nearest names; or a plan of another version.
    """
    if isinstance(memory, Plan):
        return MemorySetting(memory.label, memory.estimate.hardware, memory.job)
    text = str(memory).strip()
    if text == AUTO:
        return MemorySetting(text)
    if text in PRESETS:
        return MemorySetting(text, parse_gpus(preset(text).gpus), preset(text).job)
    if Path(text).expanduser().exists() or "/" in text or text.endswith(".json"):
        found = read_plan(Path(text).expanduser())
        return MemorySetting(text, found.estimate.hardware, found.job)
    try:
        return MemorySetting(text, parse_gpus(text))
    except ConfigError as error:
        count, _, card = text.rpartition("x")
        prefix = f"{count}x" if count.isdigit() else ""
        cards = [f"{prefix}{one.name}" for one in CARDS]
        sizes = [name for name in cards if card.lower() in name.lower()]  # "2xA100" leaves its size open
        near = sizes or get_close_matches(text, cards if prefix else [*PRESETS, *cards], n=3, cutoff=0.5)
        raise ConfigError(
            f"memory is {text!r}, which is neither auto, nor cards, nor a preset, nor the folder of a plan. Nearest: "
            f"{', '.join(near[:3]) or '4xA40-48GB'}. For a card that is not in the table write a plan: `trl-ext plan "
            "--gpu_memory_gib ... --write DIR`, and memory=DIR."
        ) from error

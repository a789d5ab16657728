"""The clock of a card, corrected by a run that was measured on it.

`trl-ext plan --calibrate RUN` divides the seconds of a run's phases by those of the formulas for the same run, and
keeps the three quotients by the card's name, for later plans.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import UNMEASURED, Hardware
from trl_ext.memory.estimate import Estimate, quick_estimate

VARIABLE = "TRL_EXT_CLOCK"  # names another file
# Parts of `step_seconds` that a measured phase covers, in the order of `Hardware.pace`.
PARTS = (("generation", "weight push"), ("scoring",), ("update", "communication", "offload"))


def clock_file() -> Path:
    """The file with the quotients of this user's cards."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(VARIABLE) or f"{cache}/trl_ext/clock.json").expanduser()


def with_clock(hardware: Hardware) -> Hardware:
    """The hardware with what was measured of its card, if anything was.

    Raises:
        ConfigError: The file is damaged.
    """
    pace = _read().get(hardware.card.name)
    return replace(hardware, pace=pace) if pace else hardware


def pace_of(planned: Estimate, measured_s: Sequence[float], mean_completion: float) -> tuple[float, float, float]:
    """Measured seconds over those of the formulas, of generation, scoring and update; 1 for what did not happen.

    Args:
        planned: The run's plan.
        measured_s: Seconds of an optimizer step: generating with rewards, forwards without gradients, all the rest.
        mean_completion: Tokens of a completion on the mean; 0 where the run generated none.
    """
    job = planned.job
    if job.generates:
        job = replace(job, mean_completion_length=max(1, min(round(mean_completion), job.max_completion_length)))
    seconds = quick_estimate(job, planned.shape, replace(planned.hardware, pace=UNMEASURED)).seconds
    by_formula = [sum(seconds.get(part, 0.0) for part in parts) for parts in PARTS]
    quotients = (
        taken / planned_s if taken and planned_s else 1.0
        for taken, planned_s in zip(measured_s, by_formula, strict=True)
    )
    generation, scoring, update = (round(one, 3) for one in quotients)
    return generation, scoring, update


def remember(card_name: str, pace: tuple[float, float, float]) -> None:
    """Keep the quotients of a card, in the place of earlier ones.

    Raises:
        ConfigError: The file is damaged, or cannot be written.
    """
    file, paces = clock_file(), {**_read(), card_name: pace}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(paces, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}. Name another file in {VARIABLE}.") from error


def _read() -> dict[str, tuple[float, float, float]]:
    file = clock_file()
    if not file.is_file():
        return {}
    try:
        paces = json.loads(file.read_text(encoding="utf-8"))
        if not all(quotient > 0 for pace in paces.values() for quotient in pace):
            raise ValueError("a quotient is not above 0")
        return {name: (float(pace[0]), float(pace[1]), float(pace[2])) for name, pace in paces.items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"{file} is damaged: {error}. Remove it, and calibrate again.") from error

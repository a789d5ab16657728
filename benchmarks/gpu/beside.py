"""What the planner answers beside what a row measured, in one form for all rows: bytes at the peak, seconds by phase.

Bytes are those of sequences at their longest, no prompt shared; seconds are for the lengths that a row has.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trl_ext.errors import ConfigError
from trl_ext.memory import Job
from trl_ext.memory.cards import Hardware, find_card
from trl_ext.memory.formulas.peak import PHASES, Setup, footprints, slack_bytes
from trl_ext.memory.formulas.times import step_seconds
from trl_ext.memory.models.shapes import ModelShape

# A part of the planner's step, and the phases of the trainers' clocks that it is held against.
PARTS = {"generation": ("generate",), "scoring": ("score", "logps"), "update": ("update",)}
# Where there is no card, so that a benchmark that is tried runs all of its code.
STAND_IN = "H100-80GB"


def card_name() -> str:
    """The card whose seconds are predicted: this machine's as torch calls it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else STAND_IN


def card_note(card: str) -> str:
    """What cannot be known of a card that is not in the planner's table; "" for one that is."""
    try:
        find_card(card)
    except ConfigError:
        return (
            f"'{card}' is not in the table of cards (trl_ext/memory/cards.py): bytes and seconds are measured, MFU "
            "and the planner's seconds stay empty. Add a line for it there, from its data sheet."
        )
    return ""


def predict(
    shape: ModelShape, job: Job, hardware: Hardware, *, generates: bool, timed: Job | None = None
) -> dict[str, Any]:
    """The planner's answer.

    Args:
        shape: The model's.
        job: The run.
        hardware: Ranks, and the card whose memory is filled; seconds are those of this machine's card.
        generates: True if the row generates, False if its completions are given.
        timed: The run with the lengths that it has, for its seconds; None for `job`.

    Returns:
        `phases`: bytes by phase; `allocated` and `reserved`: of the worst; `seconds`: of a step by part, none for a
        card that is not in the table.
    """
    found = [one for one in footprints(Setup.of(shape, job, hardware)) if generates or one.phase != "generate"]
    by_phase = {name: max((one.num_bytes for one in found if one.phase == name), default=0.0) for name in PHASES}
    reserved = max(footprint.num_bytes + slack_bytes(footprint, job) for footprint in found)
    return {
        "phases": {phase: round(num_bytes) for phase, num_bytes in by_phase.items() if num_bytes},
        "allocated": round(max(by_phase.values())),
        "reserved": round(reserved),
        "seconds": _known(predicted_seconds(shape, timed or job, hardware.num_gpus), generates),
    }


def predicted_seconds(shape: ModelShape, job: Job, num_gpus: int) -> dict[str, float]:
    """Seconds of a step by the planner's parts, on this machine's card; none if the table lacks it."""
    if card_note(card_name()):
        return {}
    return step_seconds(Setup.of(shape, job, Hardware(num_gpus, find_card(card_name()))))


def measured_seconds(phases: Mapping[str, float], *, generates: bool) -> dict[str, float]:
    """Seconds of a clock's phases by the planner's names; parts that took none are left out."""
    return _known({part: sum(phases.get(name, 0.0) for name in names) for part, names in PARTS.items()}, generates)


def _known(seconds: Mapping[str, float], generates: bool) -> dict[str, float]:
    return {part: round(s, 6) for part, s in seconds.items() if s and (generates or part != "generation")}


def beside(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The two, and by how many percent the prediction is above what was measured.

    Args:
        predicted: Of `predict`.
        measured: `allocated` and `reserved`, bytes or None, and `seconds` by the planner's names.
    """
    errors: dict[str, Any] = {kind: error_pct(predicted[kind], measured[kind]) for kind in ("allocated", "reserved")}
    seconds = {part: error_pct(predicted["seconds"].get(part), took) for part, took in measured["seconds"].items()}
    return {
        "predicted": predicted,
        "measured": measured,
        "error_pct": errors | {f"{part}_s": error for part, error in seconds.items()},
    }


def error_pct(predicted: float | None, measured: float | None) -> float | None:
    """By how many percent the prediction is above what was measured; None if either is unknown."""
    return None if predicted is None or not measured else 100 * (predicted / measured - 1)

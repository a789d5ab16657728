"""Predicted and measured memory of a run as rows of a table, from its log history."""

from collections.abc import Iterable

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import Entry

HEADER = ["memory", "predicted GiB", "measured GiB", "difference"]


def memory_rows(log_history: Iterable[Entry]) -> list[list[str]]:
    """Header and a row per phase with its highest peak; empty for a run without measured memory."""
    measured: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for entry in log_history:
        predicted |= log_keys.predicted_memory(entry)
        for phase, peak in log_keys.memory(entry).items():
            measured[phase] = max(peak, measured.get(phase, 0.0))
    return [HEADER, *(_row(phase, predicted.get(phase), peak) for phase, peak in measured.items())] if measured else []


def _row(phase: str, predicted: float | None, measured: float) -> list[str]:
    difference = "-" if not predicted else f"{measured / predicted - 1:+.1%}"
    return [phase, "-" if predicted is None else f"{predicted:.1f}", f"{measured:.1f}", difference]

"""`trl-ext plan --calibrate RUN`: correct the clock of a card by the seconds of a run that was planned and trained."""

from pathlib import Path
from statistics import fmean, median

from trl_ext.errors import ConfigError, DataError
from trl_ext.memory.clock import clock_file, pace_of, remember
from trl_ext.memory.files.plan import read_plan
from trl_ext.monitor import log_keys
from trl_ext.monitor.report import read_log_history
from trl_ext.monitor.summary import training_entries

GENERATES, SCORES = ("generate", "generate_wait", "score"), ("logps",)
LEAST_ENTRIES = 3  # the first, which warms up, is left out


def calibrate(run: str) -> str:
    """Keep what a run's phases took, over the formulas, for later plans with its card.

    Args:
        run: Its --output_dir.

    Returns:
        What was kept, in a sentence.

    Raises:
        ConfigError: The run had no plan, or has not logged its phases often enough.
    """
    folder = Path(run)
    if not (folder / "plan.json").is_file():
        raise ConfigError(f"{run} has no plan.json. Calibrate by a run that was trained with memory=auto, or a plan.")
    try:
        entries = [entry for entry in training_entries(read_log_history(folder)) if log_keys.phases(entry)]
    except DataError as error:
        raise ConfigError(str(error)) from error
    if len(entries) < LEAST_ENTRIES:
        raise ConfigError(
            f"{run} has logged its phases {len(entries)} times, and the first is left out: it warms up. Train until "
            f"there are {LEAST_ENTRIES}."
        )
    planned, entries = read_plan(folder).estimate, entries[1:]
    generates, scores, updates = [], [], []
    for entry in entries:
        phases = log_keys.phases(entry)
        generates.append(sum(phases.pop(name, 0.0) for name in GENERATES))
        scores.append(sum(phases.pop(name, 0.0) for name in SCORES))
        phases.pop(log_keys.EVALUATE, None)
        updates.append(sum(phases.values()))
    lengths = [n for entry in entries if (n := log_keys.number(entry, "completions/mean_length")) is not None]
    pace = pace_of(planned, [median(generates), median(scores), median(updates)], fmean(lengths) if lengths else 0.0)
    name = planned.hardware.card.name
    remember(name, pace)
    return (
        f"{name}: generation takes {pace[0]:g}, scoring {pace[1]:g} and the update {pace[2]:g} times the formulas' "
        f"seconds, by {len(entries)} log entries of {run}. Later plans for this card use them, from {clock_file()}."
    )

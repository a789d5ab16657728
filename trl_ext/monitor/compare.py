"""Several runs in one table: their last numbers, and the settings and versions that differ."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.monitor import log_keys
from trl_ext.monitor.record import RunRecord, read_log_history, read_record
from trl_ext.monitor.summary import summarize, training_entries
from trl_ext.monitor.words import duration, score, short, visible

_LAST_ENTRIES = 5  # of the log, averaged for a row of `_KEYS`
_KEYS = {
    "KL per token": "kl",
    "entropy": "entropy",
    "tokens per completion": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
}


def compare_runs(folders: Sequence[str | Path]) -> list[list[str]]:
    """Return a table: a header with the runs' names, a row for each number, and a row for each setting that differs.

    Raises ConfigError for fewer than two runs, DataError if a folder holds no run or an incomplete run.
    """
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        given = " ".join(map(str, folders))
        raise ConfigError(f"There is nothing to compare in: {given}. Give the folders of two or more different runs.")
    numbers, settings = [], []
    for folder in folders:
        numbers.append(_numbers(read_log_history(folder)))
        settings.append(_settings(read_record(folder)))
    differing = [row for row in _rows(settings) if len(set(row[1:])) > 1]
    return [["", *short_names([Path(folder) for folder in folders])], *_rows(numbers), *differing]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths below the folder that holds all of them."""
    shared = os.path.commonpath([folder.resolve().parent for folder in folders])
    return [str(folder.resolve().relative_to(shared)) for folder in folders]


def _rows(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row for each name, with "-" for a run without it."""
    rows = []
    for name in dict.fromkeys(chain.from_iterable(runs)):
        rows.append([visible(name), *(visible(run.get(name, "-")) for run in runs)])
    return rows


def _numbers(log_history: Sequence[log_keys.Entry]) -> dict[str, str]:
    """Return the run's last numbers, by name."""
    summary, training = summarize(log_history), training_entries(log_history)
    found: dict[str, str] = {}
    for where, changes in (("last steps", summary.training), ("held-out", summary.held_out)):
        found |= {f"{curve.name}, {where}": score(change.after) for curve, change in changes.items()}
    for name, key in _KEYS.items():
        found |= _mean(name, [log_keys.number(entry, key) for entry in training])
    found |= _mean("seconds per step", [log_keys.step_s(entry) for entry in training])
    found["steps"] = f"{summary.num_steps:,}"
    if summary.train_s is not None:
        found["training time"] = duration(summary.train_s)
    if summary.forwarded_tokens is not None:
        found["tokens forwarded"] = f"{summary.forwarded_tokens:,}"
    if summary.memory:
        found["memory at the peak, GiB"] = f"{max(float(row[2]) for row in summary.memory[1:]):.1f}"
    return found


def _mean(name: str, values: Sequence[float | None]) -> dict[str, str]:
    last = [value for value in values if value is not None][-_LAST_ENTRIES:]
    return {f"{name}, last steps": short(fmean(last))} if last else {}


def _settings(record: RunRecord | None) -> dict[str, str]:
    """Return the recipe's keys, rules, machine and versions of packages as text; empty without a record."""
    if record is None:
        return {}
    rules: Mapping[str, Any] = record.rules or {}
    settings = {name: value for name, value in record.recipe.items() if name not in ("rules", "output_dir")}
    for rule in rules.get("rules", ()):
        settings[f"rule {rule.get('name', rule.get('rule'))}"] = ", ".join(
            f"{key} {_in_words(value)}" for key, value in rule.items() if key != "name"
        )
    settings |= {f"rules: {name}": value for name, value in rules.items() if name != "rules"}
    settings |= {
        name: record.versions[name] for name in ("trainer", "num_processes", "cards") if name in record.versions
    }
    return {name: _in_words(value) for name, value in (settings | record.versions.get("packages", {})).items()}


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

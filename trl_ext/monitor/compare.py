"""Several runs on one page: their curves over each other, what they came to, and in what they differ."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Curve, Entry
from trl_ext.monitor.pages.charts import NUM_HUES, Line, Picture, line_chart
from trl_ext.monitor.pages.page import render
from trl_ext.monitor.pages.series import Series, main_panels, members, other_panels, read_series
from trl_ext.monitor.pages.verdict import RunVerdict, judge_run
from trl_ext.monitor.record import read_record
from trl_ext.monitor.report import read_state
from trl_ext.monitor.summary import Change, RunSummary, summarize, training_entries
from trl_ext.monitor.words import duration, score, short

COMPARISON_FILE = "comparison.html"
_MARK = '<meta name="generator" content="trl_ext">'  # stands at the head of every page of ours


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run of a comparison.

    Args:
        name: Short, and different from the others'.
        series, summary, verdict: Of its log.
        settings, versions: By name, as text; empty where the run has no record.
    """

    name: str
    series: Mapping[str, Series]
    summary: RunSummary
    verdict: RunVerdict
    settings: Mapping[str, str]
    versions: Mapping[str, str]


def write_comparison(folders: Sequence[str | Path], path: str | Path = COMPARISON_FILE) -> Path:
    """Write a page that compares runs.

    Args:
        folders: Of two runs or more; the first one's colours and order lead.
        path: The page; an earlier one of ours is replaced.

    Raises:
        ConfigError: Fewer than two runs, or `path` is a file of somebody else.
        DataError: A folder holds no run, or half of one.
    """
    path = Path(path)
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        given = " ".join(map(str, folders))
        raise ConfigError(f"There is nothing to compare in: {given}. Give the folders of two or more different runs.")
    if path.is_dir() or (path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]):
        raise ConfigError(f"{path} is no page that trl_ext has written. Give another --output.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {path.parent} for {path.name}. Give another --output.")
    names = short_names([Path(folder) for folder in folders])
    path.write_text(comparison_page(list(map(_read, folders, names))), encoding="utf-8")
    return path


def _read(folder: str | Path, name: str) -> ComparedRun:
    state, record = read_state(folder), read_record(folder)
    log_history: list[Entry] = state["log_history"]
    series, summary = read_series(log_history), summarize(log_history)
    max_steps = state.get("max_steps")
    verdict = judge_run(log_history, series, summary, max_steps if isinstance(max_steps, int) else None)
    versions = record.versions.get("packages", {}) if record else {}
    settings = _settings(record.recipe, record.versions, record.rules) if record else {}
    _add_derived(series, training_entries(log_history))
    return ComparedRun(name, series, summary, verdict, settings, {name: str(v) for name, v in versions.items()})


def _settings(
    recipe: Mapping[str, Any], versions: Mapping[str, Any], rules: Mapping[str, Any] | None
) -> dict[str, str]:
    """Each key of a recipe and each rule, as text."""
    settings = {name: _in_words(value) for name, value in recipe.items() if name not in ("rules", "output_dir")}
    for rule in (rules or {}).get("rules", ()):
        words = (f"{key} {_in_words(value)}" for key, value in rule.items() if key != "name")
        settings[f"rule {rule.get('name', rule.get('rule'))}"] = ", ".join(words)
    settings |= {f"rules: {name}": _in_words(value) for name, value in (rules or {}).items() if name != "rules"}
    settings |= {name: _in_words(versions[name]) for name in ("trainer", "num_processes", "cards") if name in versions}
    return settings


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _add_derived(series: dict[str, Series], training: Iterable[Entry]) -> None:
    """Add the seconds of a step, which a log holds by phase only."""
    times = [(int(entry.get("step", 0)), log_keys.step_s(entry)) for entry in training]
    known = [(step, seconds) for step, seconds in times if seconds is not None]
    if known:
        series["step_s"] = Series([step for step, _ in known], [seconds for _, seconds in known])


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as few as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


# The page ---------------------------------------------------------------------------------------------------------


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """The comparison as one HTML document."""
    main, others = _curves(runs)
    pictures = [_chart(runs, curve, title, unit, wide=not place) for place, (curve, title, unit) in enumerate(main)]
    pictures += [_chart(runs, curve, title, unit) for curve, title, unit in others]
    settings, num_same = _differences([run.settings for run in runs])
    versions, _ = _differences([run.versions for run in runs])
    return render(
        "comparison.html.jinja",
        title=f"{len(runs)} runs compared",
        runs=[(run, f"h{hue % NUM_HUES}") for hue, run in enumerate(runs)],
        numbers=[["", *(run.name for run in runs)], *_numbers(runs)],
        wide=[picture for picture in pictures[:1] if picture],
        small=[picture for picture in pictures[1:] if picture],
        settings=[["setting", *(run.name for run in runs)], *settings],
        versions=[["package", *(run.name for run in runs)], *versions],
        num_same=num_same,
        without=[run.name for run in runs if not run.settings],
    )


def _curves(runs: Sequence[ComparedRun]) -> tuple[list[tuple[Curve, str, str]], list[tuple[Curve, str, str]]]:
    """The curves that a run has, what they are about first, each once, with title and unit."""
    main: dict[str, tuple[Curve, str, str]] = {}
    others: dict[str, tuple[Curve, str, str]] = {}
    for run in runs:
        kind = run.summary.kind
        for panels, found in ((main_panels(kind), main), (other_panels(kind), others)):
            for panel in panels:
                for curve, _ in (*members(panel, run.series), *members(panel, run.series, HELD_OUT)):
                    title = curve.name if found is main or len(panel.curves) > 1 else panel.title
                    where = "" if found is main or title == panel.title else f"{panel.title}: "
                    found.setdefault(curve.key, (curve, where + title, panel.unit))
    others["step_s"] = (Curve("step_s", "seconds"), "Time of a step", "seconds")
    return list(main.values()), [curve for key, curve in others.items() if key not in main]


def _chart(runs: Sequence[ComparedRun], curve: Curve, title: str, unit: str, wide: bool = False) -> Picture | None:
    lines = []
    for hue, run in enumerate(runs):
        for key, is_held_out in ((curve.key, False), (HELD_OUT + curve.key, True)):
            if (values := run.series.get(key)) is not None:
                name = "held-out" if is_held_out else run.name
                lines.append(Line(name, values.steps, values.values, hue, is_held_out))
    size = {"width": 920, "height": 280} if wide else {}
    return line_chart(title[0].upper() + title[1:], unit, lines, **size)


def _numbers(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """What the runs came to, a row for each number that one of them has."""
    rows: list[list[str]] = []
    for where, part in (("last steps", "training"), ("held-out", "held_out")):
        found = [{curve.key: (curve, change) for curve, change in getattr(run.summary, part).items()} for run in runs]
        for key, name in {key: curve.name for one in found for key, (curve, _) in one.items()}.items():
            changes = [one[key][1] if key in one else Change() for one in found]
            rows.append([f"{name}, {where}", *(score(change.after) for change in changes)])
    for name, key in (
        ("KL per token", "kl"),
        ("entropy", "entropy"),
        ("tokens per completion", "completions/mean_length"),
        ("truncated", "completions/clipped_ratio"),
        ("seconds per step", "step_s"),
    ):
        ends = [run.series[key].values[-5:] if key in run.series else [] for run in runs]
        rows.append([f"{name}, last steps", *(short(sum(end) / len(end)) if end else "-" for end in ends)])
    summaries = [run.summary for run in runs]
    rows.append(["steps", *(f"{one.num_steps:,}" for one in summaries)])
    rows.append(["training time", *("-" if one.train_s is None else duration(one.train_s) for one in summaries)])
    tokens = (one.forwarded_tokens for one in summaries)
    rows.append(["tokens forwarded", *("-" if number is None else f"{number:,}" for number in tokens)])
    peaks = [[float(row[2]) for row in list(one.memory)[1:]] for one in summaries]
    rows.append(["memory at the peak, GiB", *(f"{max(peak):.1f}" if peak else "-" for peak in peaks)])
    return [row for row in rows if any(cell != "-" for cell in row[1:])]


def _differences(runs: Sequence[Mapping[str, str]]) -> tuple[list[list[str]], int]:
    """A row for each name whose values differ, and the number of names whose values are the same."""
    names = list(dict.fromkeys(name for run in runs for name in run))
    rows = [[name, *(run.get(name, "-") for run in runs)] for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    return differ, len(rows) - len(differ)

"""The report of one run as an HTML page: its contents and its templates.

A page is one file without scripts and external resources. No text in it is trusted: the templates escape all texts
and their invisible characters, and the page's content policy forbids the browser to run or fetch anything.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, REWARD_MODEL, Entry, RunKind, Series
from trl_ext.monitor.pages.charts import Line, Picture, line_chart
from trl_ext.monitor.pages.samples import Samples, ShownCompletion, evenly
from trl_ext.monitor.pages.verdict import judge_run
from trl_ext.monitor.summary import (
    Change,
    RunSummary,
    curve_rows,
    entry_rows,
    held_out_entries,
    phase_rows,
    summarize,
    token_rows,
    training_entries,
)
from trl_ext.monitor.words import cut, duration, score, short, visible

MOST_ROWS = 50  # of the table of steps


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Contents of a page other than the log; text that is not known is empty.

    Args:
        facts: Lines below the title.
        rules, plan: Text of the files.
        planned: The plan's figures by name.
        launch: The command that launched the run.
        max_steps, measures: See `judge_run`.
    """

    title: str = "trl_ext report"
    facts: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    rules: str = ""
    plan: str = ""
    planned: Sequence[tuple[str, str]] = ()
    launch: str = ""
    max_steps: int | None = None
    measures: Sequence[str] = ()
    samples: Samples = field(default_factory=lambda: Samples({}))


def report_page(log_history: Sequence[Entry], facts: RunFacts, summary: RunSummary | None = None) -> str:
    """Return the report as one HTML document; `summary` is computed if it is None."""
    summary, series = summary or summarize(log_history), log_keys.read_series(log_history)
    kind = summary.kind
    training = training_entries(log_history)
    held_out = evenly(held_out_entries(log_history), MOST_ROWS)
    return render(
        "report.html.jinja",
        run=facts,
        kind=kind,
        verdict=judge_run(log_history, series, summary, facts.max_steps, facts.measures),
        tiles=_tiles(series, summary),
        curves=curve_rows(summary),
        pictures=[picture for axis in kind.axes if (picture := axis_chart(kind, axis, series))],
        has_completions=kind is not REWARD_MODEL,
        phases=phase_rows(summary),
        tokens=token_rows(summary),
        memory=summary.memory,
        held_out=entry_rows(kind, held_out, HELD_OUT),
        steps=entry_rows(kind, evenly(training, MOST_ROWS), ""),
        num_logged=len(training),
    )


def axis_chart(kind: RunKind, axis: str, series: Mapping[str, Series]) -> Picture | None:
    """Draw the curves of an axis, with held-out curves in the same colour; return None if the log has none of them."""
    curves = [curve for curve in kind.curves if curve.axis == axis]
    drawn = kind.in_order(
        member for prefix in (HELD_OUT, "") for curve in curves for _, member in curve.members(series, prefix)
    )
    lines = []
    for hue, curve in enumerate(drawn):
        is_strong = curve.key == kind.curves[0].key and len(drawn) > 1
        for key, name, is_held_out in ((curve.key, curve.name, False), (HELD_OUT + curve.key, "held-out", True)):
            if values := series.get(key):
                lines.append(Line(name, values.steps, values.values, hue, is_held_out, is_strong))
    return line_chart(axis[0].upper() + axis[1:], lines)


def _tiles(series: Mapping[str, Series], summary: RunSummary) -> list[tuple[str, str]]:
    """Return the most important numbers, by name."""
    tiles = []
    for title, changes in (("training", summary.training), ("held-out", summary.held_out)):
        change = next((found for c, found in changes.items() if c.key == summary.kind.curves[0].key), Change())
        if change.after is not None:
            before = "" if change.before is None else f"{score(change.before)} → "
            tiles.append((f"{summary.kind.curves[0].name}, {title}", f"{before}{score(change.after)}"))
    for name, key in (
        ("tokens per completion", "completions/mean_length"),
        ("truncated completions", "completions/clipped_ratio"),
        ("KL per token", "kl"),
        ("KL per completion", "objective/kl"),
    ):
        if key in series:
            values = series[key].values
            words = [f"{one:.0%}" if "truncated" in name else score(one) for one in (values[0], values[-1])]
            tiles.append((name, " → ".join(words) if len(values) > 1 else words[0]))
    step_s = summary.phase_s and sum(s for name, s in summary.phase_s.items() if name != log_keys.EVALUATE)
    if step_s and summary.num_steps:
        tiles.append(("time per step", f"{short(step_s / summary.num_steps)} s"))
    if summary.train_s is not None:
        tiles.append(("training time", duration(summary.train_s)))
    forwarded, padded = summary.forwarded_tokens or 0, summary.padded_tokens or 0
    if 0 < forwarded < padded:
        tiles.append(("tokens saved by packing", f"{1 - forwarded / padded:.0%}"))
    return tiles


# Templates --------------------------------------------------------------------------------------------------------


def render(template: str, **context: Any) -> str:
    """Fill a template of this folder."""
    return _templates().get_template(template).render(**context)


@functools.cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    folder = Path(__file__).parent / "templates"
    templates = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Applies to every text that a template inserts; Markup was already written by a template.
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    templates.filters |= {"cut": cut, "explained": _explained}
    templates.globals["style"] = Markup((folder / "style.css").read_text(encoding="utf-8"))
    return templates


def _explained(one: ShownCompletion) -> list[list[str]]:
    """Return the rules' lines of a completion as rows of a table."""
    rows = [["rule", "value", "status", "adds", "detail"]]
    for part in one.parts:
        value, adds = (
            "-" if number is None else f"{number:{sign}.3f}" for number, sign in ((part.value, ""), (part.adds, "+"))
        )
        rows.append([part.rule, value, part.status, adds, part.detail])
    used = [column for column in range(5) if any(row[column] not in ("", "-") for row in rows[1:])]
    return [[row[column] for column in used] for row in rows]

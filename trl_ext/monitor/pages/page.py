"""The report of one run as an HTML page: its contents and its templates.

A page is one file without scripts and external resources. No text in it is trusted: the templates escape all texts
and their invisible characters, and the page's content policy forbids the browser to run or fetch anything.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, REWARD_MODEL, Entry, RunKind, Series
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
from trl_ext.monitor.words import cut, duration, score, short, visible, without_empty_columns

MOST_ROWS = 50  # of the table of steps
T = TypeVar("T")

MOST_POINTS = 240  # of a line; more points are averaged to this number
MOST_MARKERS = 40  # A line of at most so many points shows each point.
NUM_HUES = 8

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 8, 22
_LETTER = 6.5  # width in pixels of a letter of a label
# The least range of an axis relative to its values: labels of a smaller range would need many digits.
_LEAST_RANGE = 1e-4


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Contents of a page other than the log; text that is not known is empty.

    Args:
        facts: Lines below the title.
        rules, plan: Text of the files.
        planned: The plan's figures by name.
        launch: The command that launched the run.
        max_steps, measures, faster_generation: See `judge_run`.
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
    faster_generation: str = ""
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
        verdict=judge_run(log_history, series, summary, facts.max_steps, facts.measures, facts.faster_generation),
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


# Tiles of a logged key: name, key, and how a value is written.
_LOGGED_TILES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens per completion", "completions/mean_length", score),
    ("truncated completions", "completions/clipped_ratio", "{:.0%}".format),
    ("KL per token", "kl", score),
    ("KL per completion", "objective/kl", score),
)


def _tiles(series: Mapping[str, Series], summary: RunSummary) -> list[tuple[str, str]]:
    """Return the most important numbers, by name."""
    tiles = []
    main = summary.kind.curves[0]
    for title, changes in (("training", summary.training), ("held-out", summary.held_out)):
        change = changes.get(main, Change())
        if change.after is not None:
            before = "" if change.before is None else f"{score(change.before)} → "
            tiles.append((f"{main.name}, {title}", f"{before}{score(change.after)}"))
    for name, key, write in _LOGGED_TILES:
        if key in series:
            values = series[key].values
            first, last = write(values[0]), write(values[-1])
            tiles.append((name, f"{first} → {last}" if len(values) > 1 else first))
    step_s = sum(summary.step_phase_s.values())
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
    return without_empty_columns(rows, ("", "-"))


# Charts: lines over steps, as positions in pixels from the top left corner, which a template writes as SVG ----------


@dataclass(frozen=True, slots=True)
class Line:
    """Values over steps.

    Args:
        hue: Number of its colour; lines of the same hue belong together.
        is_held_out: Drawn as rings without a line.
        is_strong: Drawn thicker.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    hue: int = 0
    is_held_out: bool = False
    is_strong: bool = False


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line of a picture.

    Args:
        style: CSS classes.
        path: The line, an SVG path.
        markers: Positions of single values, with a text.
        last: The last value, as text.
    """

    name: str
    style: str
    path: str
    markers: tuple[tuple[float, float, str], ...]
    last: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart ready to be written.

    Args:
        x_ticks, y_ticks: Positions with their labels.
        left: Width of the labels on the left.
    """

    title: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    strokes: tuple[Stroke, ...]
    left: int

    width, height, right = 920, 250, _RIGHT
    bottom = height - _BOTTOM


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


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


def line_chart(title: str, lines: Sequence[Line]) -> Picture | None:
    """Draw lines over steps; None without a value."""
    lines = [line for line in lines if line.values]
    if not lines:
        return None
    y = _y_scale([value for line in lines for value in line.values])
    y_ticks = _y_ticks(y)
    left = max(_LEFT, round(10 + _LETTER * max((len(label) for _, label in y_ticks), default=0)))
    steps = [step for line in lines for step in line.steps]
    only = 1 if min(steps) == max(steps) else 0  # a single step is in the middle
    x = Scale(min(steps) - only, max(steps) + only, left, Picture.width - _RIGHT)
    return Picture(title, _x_ticks(x), y_ticks, tuple(_stroke(line, x, y) for line in lines), left)


def _stroke(line: Line, x: Scale, y: Scale) -> Stroke:
    style = " ".join(
        (
            f"h{line.hue % NUM_HUES} d{line.hue // NUM_HUES % 3}",
            *(["strong"] if line.is_strong else []),
            *(["held"] if line.is_held_out else []),
        )
    )
    last = short(line.values[-1])
    if line.is_held_out or len(line.steps) <= MOST_MARKERS:
        markers = tuple(
            (round(x(step), 1), round(y(value), 1), f"{line.name}, step {step:,}: {short(value)}")
            for step, value in zip(line.steps, line.values, strict=True)
        )
        path = "" if line.is_held_out else _path((place[0], place[1]) for place in markers)
        return Stroke(line.name, style, path, markers, last)
    points = list(zip(map(x, line.steps), map(y, line.values), strict=True))
    parts = [list(zip(*part, strict=True)) for part in _parts(points)]
    return Stroke(line.name, style, _path((fmean(xs), fmean(ys)) for xs, ys in parts), (), last)


def _parts(points: Sequence[T]) -> list[Sequence[T]]:
    """Split points into at most MOST_POINTS parts whose sizes differ by at most 1."""
    number = min(MOST_POINTS, len(points))
    edges = [place * len(points) // number for place in range(number + 1)]
    return [points[start:end] for start, end in itertools.pairwise(edges)]


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)


# Scales -----------------------------------------------------------------------------------------------------------


def _y_scale(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = (0.0, high or 1.0) if low >= 0 else (low, 0.0)
    elif 0 <= low <= 0.6 * high:
        low = 0.0
    else:
        missing = max(_LEAST_RANGE * max(abs(low), abs(high)) - (high - low), 0.0)
        low, high = low - missing / 2 - 0.05 * (high - low), high + missing / 2
    step = _nice_step((high - low) / 4)
    return Scale(low, max(high + 0.04 * (high - low), low + step), Picture.bottom, _TOP)


def _nice_step(rough: float) -> float:
    """Round up to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _x_ticks(x: Scale) -> tuple[tuple[float, str], ...]:
    step = max(_nice_step((x.high - x.low) / 6), 1)
    first = math.ceil(x.low / step)
    ticks = [number * step for number in range(first, math.floor(x.high / step) + 1) if number * step >= 0]
    return tuple((round(x(tick), 1), f"{tick:,.0f}") for tick in ticks)


def _y_ticks(y: Scale) -> tuple[tuple[float, str], ...]:
    for parts in (4, 8):  # if a quarter of the range gives a single tick, an eighth
        step = _nice_step((y.high - y.low) / parts)
        numbers = range(math.ceil(y.low / step - 1e-9), math.floor(y.high / step + 1e-9) + 1)
        if len(numbers) > 1:
            break
    # Seven digits distinguish neighbours of the least range.
    return tuple((round(y(number * step), 1), f"{number * step:.7g}") for number in numbers)

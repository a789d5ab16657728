"""Charts: positions that a template writes as SVG, so that a page needs no library.

Coordinates are pixels from the top left corner of the picture.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from trl_ext.monitor.words import short

T = TypeVar("T")

MOST_POINTS = 240  # of a line; more points are averaged to this number
MOST_MARKERS = 40  # A line of at most so many points shows each point.
NUM_HUES = 8
# A larger ratio of maximum to median gives a logarithmic axis: otherwise one outlier flattens the rest.
_LOG_RATIO = 100.0

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 8, 22
_LETTER = 6.5  # width in pixels of a letter of a label
# The least range of an axis relative to its values: labels of a smaller range would need many digits.
_LEAST_RANGE = 1e-4


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
        strokes: Lines, or areas if `is_stacked`.
        note: A remark in the heading, or empty.
        left: Width of the labels on the left.
    """

    title: str
    unit: str
    width: int
    height: int
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    strokes: tuple[Stroke, ...]
    is_stacked: bool = False
    note: str = ""
    left: int = _LEFT

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    right = _RIGHT


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def at(self, pixel: float) -> float:
        """Return the value at this position of a linear scale."""
        return self.low + (pixel - self.start) / (self.end - self.start) * (self.high - self.low)


def line_chart(title: str, unit: str, lines: Sequence[Line], width: int = 440, height: int = 190) -> Picture | None:
    """Draw lines over steps; None without a value."""
    lines = [line for line in lines if line.values]
    if not lines:
        return None
    values = [value for line in lines for value in line.values]
    y = _y_scale(values, height)
    y_ticks = _y_ticks(y)
    left = max(_LEFT, round(10 + _LETTER * max((len(label) for _, label in y_ticks), default=0)))
    x = _x_scale([line.steps for line in lines], width, left=left)
    strokes = tuple(_stroke(line, x, y) for line in lines)
    note = "logarithmic axis" if y.is_log else ""
    return Picture(title, unit, width, height, _x_ticks(x), y_ticks, strokes, note=note, left=left)


def stacked_chart(title: str, unit: str, lines: Sequence[Line], width: int = 920, height: int = 220) -> Picture | None:
    """Draw stacked values, with a column for each step, or for several steps of a long run."""
    steps = sorted({step for line in lines for step in line.steps})
    if not steps:
        return None
    x = _x_scale([steps], width, columns=True)
    columns = _columns(steps)
    edges = [x(column[0] - _half(steps)) for column in columns] + [x(steps[-1] + _half(steps))]
    tops = [[0.0] * len(columns)]
    for line in lines:
        by_step = dict(zip(line.steps, line.values, strict=True))
        tops.append(
            [
                below + math.fsum(by_step.get(step, 0.0) for step in column) / len(column)
                for below, column in zip(tops[-1], columns, strict=True)
            ]
        )
    y = _y_scale([0.0, *tops[-1]], height)
    strokes = []
    for line, low, high in zip(lines, tops, tops[1:], strict=False):
        path = f"M{_staircase(edges, [y(v) for v in high])}L{_staircase(edges[::-1], [y(v) for v in reversed(low)])}Z"
        strokes.append(Stroke(line.name, _style(line), path, (), ""))
    return Picture(title, unit, width, height, _x_ticks(x), _y_ticks(y), tuple(strokes), is_stacked=True)


def _stroke(line: Line, x: Scale, y: Scale) -> Stroke:
    last = short(line.values[-1])
    if line.is_held_out or len(line.steps) <= MOST_MARKERS:
        markers = tuple(
            (round(x(step), 1), round(y(value), 1), f"{line.name}, step {step:,}: {short(value)}")
            for step, value in zip(line.steps, line.values, strict=True)
        )
        path = "" if line.is_held_out else _path((place[0], place[1]) for place in markers)
        return Stroke(line.name, _style(line), path, markers, last)
    points = list(zip(map(x, line.steps), map(y, line.values), strict=True))
    parts = [list(zip(*part, strict=True)) for part in _columns(points)]
    return Stroke(line.name, _style(line), _path((fmean(xs), fmean(ys)) for xs, ys in parts), (), last)


def _columns(points: Sequence[T]) -> list[Sequence[T]]:
    """Split points into at most MOST_POINTS parts whose sizes differ by at most 1."""
    number = min(MOST_POINTS, len(points))
    edges = [place * len(points) // number for place in range(number + 1)]
    return [points[start:end] for start, end in itertools.pairwise(edges)]


def _style(line: Line) -> str:
    parts = [f"h{line.hue % NUM_HUES}", f"d{line.hue // NUM_HUES % 3}"]
    parts += ["strong"] if line.is_strong else []
    return " ".join([*parts, "held"] if line.is_held_out else parts)


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)


def _staircase(edges: Sequence[float], heights: Sequence[float]) -> str:
    corners = ((edge, height) for at, height in enumerate(heights) for edge in edges[at : at + 2])
    return "L".join(f"{px:.1f} {py:.1f}" for px, py in corners)


# Scales -----------------------------------------------------------------------------------------------------------


def _half(steps: Sequence[int]) -> float:
    """Return half the distance of neighbouring steps, which is half the width of a column."""
    return (steps[-1] - steps[0]) / (len(steps) - 1) / 2 if len(steps) > 1 else 0.5


def _x_scale(steps: Sequence[Sequence[int]], width: int, columns: bool = False, left: int = _LEFT) -> Scale:
    low, high = float(min(map(min, steps))), float(max(map(max, steps)))
    if columns:
        low, high = low - _half(steps[0]), high + _half(steps[0])
    elif low == high:
        low, high = low - 1, high + 1
    return Scale(low, high, left, width - _RIGHT)


def _y_scale(values: Sequence[float], height: int) -> Scale:
    low, high = min(values), max(values)
    start, end = float(height - _BOTTOM), float(_TOP)
    median = sorted(values)[len(values) // 2]
    if low > 0 and high > _LOG_RATIO * median:
        return Scale(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)), start, end, is_log=True)
    if low == high:
        low, high = (0.0, high or 1.0) if low >= 0 else (low, 0.0)
    elif 0 <= low <= 0.6 * high:
        low = 0.0
    else:
        missing = max(_LEAST_RANGE * max(abs(low), abs(high)) - (high - low), 0.0)
        low, high = low - missing / 2 - 0.05 * (high - low), high + missing / 2
    step = _nice_step((high - low) / 4)
    return Scale(low, max(high + 0.04 * (high - low), low + step), start, end)


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
    if y.is_log:
        low, high = round(math.log10(y.low)), round(math.log10(y.high))
        powers = range(low, high + 1, math.ceil((high - low) / 5))
        return tuple((round(y(10.0**power), 1), f"{10.0**power:g}") for power in powers)
    for parts in (4, 8):  # if a quarter of the range gives a single tick, an eighth
        step = _nice_step((y.high - y.low) / parts)
        numbers = range(math.ceil(y.low / step - 1e-9), math.floor(y.high / step + 1e-9) + 1)
        if len(numbers) > 1:
            break
    return tuple((round(y(number * step), 1), _tick_label(number * step, step)) for number in numbers)


def _tick_label(value: float, step: float) -> str:
    """Write a value of an axis with enough digits to distinguish it from its neighbours, a step away."""
    if value == 0:
        return "0"
    if step >= 1000:
        return f"{value / 1000:,.10g}k" if step < 1e6 else f"{value / 1e6:,.10g}M"
    last, first = (math.floor(math.log10(one) + 1e-9) for one in (step, abs(value)))
    return f"{value:.{max(0, first - last)}e}" if step < 1e-3 and first < -2 else f"{value:.{max(0, -last)}f}"

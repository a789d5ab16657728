"""Charts: lines over steps, as positions that a template writes as SVG, so that a page needs no library.

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

"""Shape a rule's value into its contribution: scale, clip, conditions on the row, and the weight over the run.

value -> scale -> clip -> gate -> weight * schedule(progress)
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trl_ext.errors import RuleError

Points = tuple[tuple[float, float], ...]


def scaled(value: float, scale: tuple[float, float] | None, clip: tuple[float, float] | None) -> float:
    if scale is not None:
        value = (value - scale[0]) / (scale[1] - scale[0])
    return value if clip is None else min(max(value, clip[0]), clip[1])


def applies(when: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> bool:
    """Return True if each column named in `when` has one of the values given there: the rule judges this row."""
    if not when:
        return True
    return all(columns.get(name) in wanted for name, wanted in when.items())


def factor_at(schedule: Points | None, progress: float) -> float:
    """Return the weight's factor at this progress (0 to 1): straight lines between the points, flat outside them."""
    if schedule is None:
        return 1.0
    after = bisect_right([point[0] for point in schedule], progress)
    if after == 0:
        return schedule[0][1]
    if after == len(schedule):
        return schedule[-1][1]
    (x0, y0), (x1, y1) = schedule[after - 1 : after + 1]
    return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)


def progress_of(trainer_state: Any) -> float:
    """Return the completed share of the training, 0 to 1; 0 if the trainer does not know it."""
    steps = getattr(trainer_state, "max_steps", 0) or 0
    return min(max(getattr(trainer_state, "global_step", 0) / steps, 0.0), 1.0) if steps > 0 else 0.0


def pair_of(owner: str, key: str, value: Any) -> tuple[float, float] | None:
    """Check a pair of finite numbers, the lower one first, or raise RuleError; None stays None."""
    if value is None:
        return None
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not all(_is_number(bound) for bound in pair):
        raise RuleError(f"{owner}: {key} is {value!r}. Give two finite numbers, such as (-1, 1).")
    if pair[0] >= pair[1]:
        raise RuleError(f"{owner}: {key} is {value!r}. Give the lower bound first.")
    return float(pair[0]), float(pair[1])


def conditions_of(owner: str, value: Any) -> dict[str, tuple[Any, ...]] | None:
    """Read `{"task": "math"}` or `{"task": ["math", "logic"]}` as tuples of values, or RuleError; None stays None."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise RuleError(f"{owner}: when is {value!r}. Give columns with their values, such as {{'task': 'math'}}.")
    return {name: tuple(v) if isinstance(v, list | tuple) else (v,) for name, v in value.items()}


def points_of(owner: str, value: Any) -> Points | None:
    """Check points such as `((0.0, 1.0), (0.5, 0.2))`, or raise RuleError; None stays None."""
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    points = tuple(tuple(p) if isinstance(p, list | tuple) else (p,) for p in value) if is_list else ()
    good = all(len(p) == 2 and all(_is_number(x) for x in p) and 0 <= p[0] <= 1 for p in points)
    if not points or not good or any(a[0] >= b[0] for a, b in pairwise(points)):
        raise RuleError(
            f"{owner}: schedule is {value!r}. Give points (progress, factor), with progress rising from 0 to 1, such "
            "as ((0.0, 1.0), (0.5, 0.2))."
        )
    return tuple((float(p[0]), float(p[1])) for p in points)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")

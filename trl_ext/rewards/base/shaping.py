"""Shape a rule's value into its contribution: scale, clip and conditions on the row.

value -> scale -> clip -> gate -> weight
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from trl_ext.errors import RuleError


def scaled(value: float, scale: tuple[float, float] | None, clip: tuple[float, float] | None) -> float:
    if scale is not None:
        value = (value - scale[0]) / (scale[1] - scale[0])
    return value if clip is None else min(max(value, clip[0]), clip[1])


def applies(when: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> bool:
    """Return True if each column named in `when` has one of the values given there: the rule judges this row."""
    if not when:
        return True
    return all(columns.get(name) in wanted for name, wanted in when.items())


def pair_of(owner: str, key: str, value: Any) -> tuple[float, float] | None:
    """Check a pair of finite numbers, the lower one first, or raise RuleError; None stays None."""
    if value is None:
        return None
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not all(
        isinstance(bound, int | float) and not isinstance(bound, bool) and isfinite(bound) for bound in pair
    ):
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

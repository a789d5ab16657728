"""Bound the digits of an expression's value from its tree, and compute the exact value if it is rational."""

import math
from fractions import Fraction

from trl_ext.rewards.mathematics.bounds import MAX_DIGITS, TooComplex, Unreadable
from trl_ext.rewards.mathematics.parse import MINUS_ONE, Node

_LOG_2 = math.log10(2)
_HUGE = 10**300
GROWING = frozenset({"factorial", "binomial", "exp", "sinh", "cosh"})  # faster than any power


def size(node: Node) -> float:
    """Return the digits that a tree's value may need on either side of the point; TooComplex above MAX_DIGITS."""
    digits = _size(node)
    if digits > MAX_DIGITS:
        raise TooComplex(f"a value of more than {MAX_DIGITS} digits")
    return digits


def _size(node: Node) -> float:
    kind = node[0]
    if kind == "num":
        return math.log10(max(2, abs(node[1].numerator), node[1].denominator))
    if kind in ("var", "const"):
        return 0.16 if kind == "var" else 0.5  # A variable is evaluated between 0.7 and 1.4.
    sizes = [size(child) for child in node[1:] if isinstance(child, tuple)]
    if kind == "pow":
        return sizes[0] * max(1.0, _largest(node[2]))
    if kind == "call":
        grown = _call_digits(node[1], [_largest(child) for child in node[2:]]) if node[1] in GROWING else 0.0
        return sum(sizes) + 1 + grown
    return sum(sizes) + _LOG_2 * (len(sizes) - 1)


def _call_digits(name: str, values: list[float]) -> float:
    """Return the decimal digits before the point of a function's value at the given arguments."""
    largest = values[0]
    if name == "factorial":
        return largest * math.log10(largest + 2)
    if name == "binomial":
        return min(largest * _LOG_2, values[1] * math.log10(largest + 2))
    return largest / 2 if name in GROWING else math.log10(max(values) + 10)


def _largest(node: Node) -> float:
    """Estimate the largest absolute value of a tree, at most 1e300. If it is too low, the evaluation stops."""
    kind = node[0]
    if kind == "num":
        return float(min(abs(node[1]), _HUGE))
    if kind in ("var", "const"):
        return 1.4 if kind == "var" else math.pi
    values = [_largest(child) for child in node[1:] if isinstance(child, tuple)]
    if kind == "add":
        return min(sum(values), _HUGE)
    if kind == "mul":
        return min(math.prod(values), _HUGE)
    if kind == "call":
        return 10.0 ** min(_call_digits(node[1], values), 300)
    base, exponent = values
    if node[2] == MINUS_ONE and base > 0:
        return min(1 / base, _HUGE) if node[1][0] == "num" else 10.0
    return 10.0 ** min(math.log10(max(base, 2)) * max(exponent, 1), 300)


def exact_value(node: Node) -> Fraction | None:
    """Return the rational value of a tree whose `size` was checked; None if the value is not rational."""
    try:
        return _exact(node)
    except ZeroDivisionError:
        raise Unreadable("a division by zero") from None


def _exact(node: Node) -> Fraction | None:
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind in ("var", "const"):
        return None
    values = [_exact(child) for child in node[1:] if isinstance(child, tuple)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if kind == "add":
        return sum(known, Fraction(0))
    if kind == "mul":
        return math.prod(known, start=Fraction(1))
    if kind == "call":
        return _exact_call(node[1], known)
    base, exponent = known
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0 or exponent.denominator > 64:
        return None
    top, bottom = _root(base.numerator, exponent.denominator), _root(base.denominator, exponent.denominator)
    return None if top is None or bottom is None else Fraction(top, bottom) ** exponent.numerator


def _root(number: int, degree: int) -> int | None:
    """Return the root of an integer; None if the root is no integer."""
    if number < 2:
        return number
    low, high = 1, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low if low**degree == number else None


def _exact_call(name: str, values: list[Fraction]) -> Fraction | None:
    first = values[0]
    whole = all(value.denominator == 1 and value >= 0 for value in values)
    if name == "factorial" and whole:
        return Fraction(math.factorial(int(first)))
    if name == "binomial" and whole:
        return Fraction(math.comb(int(first), int(values[1])))
    if name == "abs":
        return abs(first)
    if name in ("floor", "ceil"):
        return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
    return None

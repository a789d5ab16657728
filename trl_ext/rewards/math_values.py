"""What an expression is worth: exactly where it is rational, else as numbers at fixed points.

Two expressions are the same when they agree at four points, to far more digits than either spells: for
the sums, products, powers and functions of an answer, that happens by chance as good as never. It costs milliseconds
whatever the answer is, where symbolic simplification may not return.

`size` comes first: it bounds the digits of everything that the evaluation meets, from the tree alone.
"""

import hashlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from trl_ext.rewards.math_limits import MAX_DIGITS, TooComplex, Unreadable
from trl_ext.rewards.math_parse import Node, parse
from trl_ext.rewards.math_tokens import Tokens

_NUM_POINTS = 4  # The last one has negative variables.
_SPARE_DIGITS = 20
_LOG_2 = math.log10(2)
_HUGE = 10**300
_MINUS_ONE = ("num", Fraction(-1))

_local = threading.local()  # An mpmath context holds its precision, so every thread needs one of its own.


@dataclass(frozen=True, slots=True)
class Value:
    """An expression's worth.

    `exact` is the rational value, where it has one. `digits` bounds the decimals that the expression spells, `names`
    are its variables, and `branching` tells that a logarithm or a root of one is involved, so that negative points say
    nothing.
    """

    node: Node
    exact: Fraction | None
    digits: int
    names: frozenset[str]
    branching: bool


@lru_cache(maxsize=4096)  # A gold is compared with every completion of its group.
def value_of(tokens: Tokens) -> Value:
    """The worth of an expression; Unreadable or TooComplex where it has none."""
    node = parse(tokens)
    digits = math.ceil(size(node))
    return Value(node, exact_value(node), digits, frozenset(_variables(node)), _branches(node))


def same_value(left: Value, right: Value) -> bool:
    """Whether two expressions have one value."""
    if left.exact is not None and right.exact is not None:
        return left.exact == right.exact
    digits = _precision(left, right)
    return all(a is not None and b is not None and _close(a, b, digits) for a, b in _pairs(left, right, digits))


def proportion(left: Value, right: Value) -> Any:
    """The constant real c with left = c * right at every point; None without one, and where either is zero."""
    digits = _precision(left, right)
    pairs = list(_pairs(left, right, digits))
    if any(a is None or b is None or _close(a, 0, digits) or _close(b, 0, digits) for a, b in pairs):
        return None
    factors = [a / b for a, b in pairs]
    if not all(_close(factor, factors[0], digits) for factor in factors) or not _close(factors[0].imag, 0, digits):
        return None
    return factors[0].real


def _precision(left: Value, right: Value) -> int:
    """Decimals to compare, in steps, so that a gold's values are computed once for most answers."""
    return -(-(left.digits + right.digits + _SPARE_DIGITS) // 50) * 50


def _pairs(left: Value, right: Value, digits: int) -> Iterator[tuple[Any, Any]]:
    """Both values at the points that count: one without variables, no negative ones for roots and logarithms."""
    count = _NUM_POINTS - (left.branching or right.branching) if left.names or right.names else 1
    for index in range(count):
        yield _at_point(left, index, digits), _at_point(right, index, digits)


def size(node: Node) -> float:
    """Decimal digits that the value of a tree may need, before or behind the point; TooComplex above MAX_DIGITS."""
    digits = _size(node)
    if digits > MAX_DIGITS:
        raise TooComplex(f"a value of more than {MAX_DIGITS} digits")
    return digits


def _size(node: Node) -> float:
    kind = node[0]
    if kind == "num":
        return math.log10(max(2, abs(node[1].numerator), node[1].denominator))
    if kind in ("var", "const"):
        return 0.5
    sizes = [size(child) for child in node[1:] if isinstance(child, tuple)]
    if kind == "pow":
        return sizes[0] * max(1.0, _largest(node[2]))
    if kind == "call":
        return _call_size(node, sizes)
    return sum(sizes) + _LOG_2 * (len(sizes) - 1)


def _call_size(node: Node, sizes: list[float]) -> float:
    name, largest = node[1], _largest(node[2])
    if name == "factorial":
        return largest * math.log10(largest + 2)
    if name == "binomial":
        return min(largest * _LOG_2, _largest(node[3]) * sizes[0]) + 1
    if name in ("exp", "sinh", "cosh"):
        return largest * 0.5 + 1
    return sum(sizes) + 1


def _largest(node: Node) -> float:
    """About the largest absolute value of a tree whose `size` is known, at most 1e300. Bounds work, not results."""
    kind = node[0]
    if kind == "num":
        return float(min(abs(node[1]), _HUGE))
    if kind in ("var", "const"):
        return math.pi
    values = [_largest(child) for child in node[1:] if isinstance(child, tuple)]
    if kind == "add":
        return min(sum(values), _HUGE)
    if kind == "mul":
        return min(math.prod(values), _HUGE)
    if kind == "pow":
        return _largest_power(node, *values)
    return 10.0 ** min(_call_size(node, values), 300)


def _largest_power(node: Node, base: float, exponent: float) -> float:
    if node[2] == _MINUS_ONE and base > 0:
        return min(1 / base, _HUGE) if node[1][0] == "num" else 10.0
    return 10.0 ** min(math.log10(max(base, 2)) * max(exponent, 1), 300)


def exact_value(node: Node) -> Fraction | None:
    """The rational value of a tree whose `size` is known to be small; None for any other."""
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
    return _exact_power(*known) if kind == "pow" else _exact_call(node[1], known)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0 or exponent.denominator > 64:
        return None
    top, bottom = _root(base.numerator, exponent.denominator), _root(base.denominator, exponent.denominator)
    return None if top is None or bottom is None else Fraction(top, bottom) ** exponent.numerator


def _root(number: int, degree: int) -> int | None:
    """The whole root of a whole number, where it has one."""
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
    simple = {"abs": abs, "floor": lambda x: Fraction(math.floor(x)), "ceil": lambda x: Fraction(math.ceil(x))}
    return simple[name](first) if name in simple else None


def _variables(node: Node) -> Iterator[str]:
    if node[0] == "var":
        yield node[1]
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from _variables(child)


def _branches(node: Node) -> bool:
    """Whether a logarithm, an inverse function or a power that is not whole meets a variable."""
    cut = node[0] == "call" and (node[1] in ("log", "ln") or node[1].startswith("arc"))
    cut = cut or (node[0] == "pow" and (node[2][0] != "num" or node[2][1].denominator != 1))
    if cut and any(_variables(node)):
        return True
    return any(_branches(child) for child in node[1:] if isinstance(child, tuple))


@lru_cache(maxsize=4096)
def _at_point(value: Value, index: int, digits: int) -> Any:
    """The value at one point, with twice the digits that are compared; None where it is not finite."""
    context = _context()
    context.dps = 2 * digits
    point = {name: _coordinate(context, name, index) for name in value.names}
    try:
        found = context.mpc(_evaluate(value.node, context, point))
    except (ArithmeticError, ValueError, TypeError, NotImplementedError):  # what mpmath raises outside a domain
        return None
    return found if context.isfinite(found) else None


def _context() -> Any:
    if not hasattr(_local, "context"):
        from mpmath import MPContext

        _local.context = MPContext()
    return _local.context


def _coordinate(context: Any, name: str, index: int) -> Any:
    """Where a variable stands at a point: between 0.4 and 2.4, the same in every process."""
    digest = hashlib.sha256(f"{index}:{name}".encode("utf-8", "backslashreplace")).digest()
    place = context.mpf(int.from_bytes(digest[:8], "big")) / 2**63 + context.mpf("0.4")
    return -place if index == _NUM_POINTS - 1 else place


def _evaluate(node: Node, context: Any, point: dict[str, Any]) -> Any:
    kind = node[0]
    if kind == "num":
        return context.mpf(node[1].numerator) / node[1].denominator
    if kind == "var":
        return point[node[1]]
    if kind == "const":
        return {"pi": +context.pi, "e": +context.e, "i": context.j}[node[1]]
    values = [_evaluate(child, context, point) for child in node[1:] if isinstance(child, tuple)]
    if kind == "add":
        return context.fsum(values)
    if kind == "mul":
        return context.fprod(values)
    return context.power(*values) if kind == "pow" else _call(node[1], values, context)


def _call(name: str, values: list[Any], context: Any) -> Any:
    """mpmath's function of that name, where it has the same one."""
    if name == "log":
        return context.log(values[0], values[1] if len(values) > 1 else 10)
    own = {"abs": "fabs", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    return getattr(context, own.get(name, name))(*values)


def _close(left: Any, right: Any, digits: int) -> bool:
    context = _context()
    context.dps = 2 * digits
    left, right = context.mpc(left), context.mpc(right)  # Cached values belong to the context of their thread.
    return bool(abs(left - right) <= max(1, abs(left), abs(right)) * context.mpf(10) ** -digits)

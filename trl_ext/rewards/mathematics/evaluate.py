"""Evaluate an expression: exactly if it is rational, else as numbers at fixed points.

Two expressions are the same if they agree at four points, to far more digits than they are written with. For the
expressions of answers, this practically never happens by chance. It takes milliseconds for any answer, while symbolic
simplification may not return. `size` runs first: it bounds, from the tree alone, the digits of all values.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from trl_ext.rewards.mathematics.parse import MINUS_ONE, Node, parse
from trl_ext.rewards.mathematics.tokens import MAX_DIGITS, Tokens, TooComplex, Unreadable

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
        name, first = node[1], known[0]
        if name in ("factorial", "binomial") and all(value.denominator == 1 and value >= 0 for value in known):
            return Fraction(math.factorial(int(first)) if name == "factorial" else math.comb(*map(int, known)))
        rounded: dict[str, Callable[[Fraction], Fraction | int]] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}
        return Fraction(rounded[name](first)) if name in rounded else None
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


_NUM_POINTS = 4  # The last point has negative variables.
_ROUNDED_POINTS = range(_NUM_POINTS, 36)
_MAX_ROUNDED = 50
_SPARE_DIGITS = 20
_MAX_COST = 400  # calls at 100 digits; a tenth of a second
_MAX_GAMMA_DIGITS = 100  # The gamma function needs seconds for the first value to a thousand digits.

_local = threading.local()  # An mpmath context holds its precision, so every thread needs a separate context.


@dataclass(frozen=True, slots=True)
class Value:
    """An expression's value, and the cost of evaluating it.

    Args:
        exact: The value if it is rational, else None.
        digits: Upper bound of the decimals of its numbers.
        names: Its variables.
        rounding: True if it rounds a variable; it is then compared at many points, most of them whole.
        branching: True for a logarithm or root of a variable; no negative point is then used.
        num_calls: Number of powers and functions to evaluate; 0 with an exact value.
        gamma: True for a factorial or binomial of other than whole numbers.
    """

    node: Node
    exact: Fraction | None
    digits: int
    names: frozenset[str]
    rounding: bool
    branching: bool
    num_calls: int
    gamma: bool


@lru_cache(maxsize=4096)  # A gold is compared with every completion of its group.
def value_of(tokens: Tokens) -> Value:
    """Return the value of an expression, or raise Unreadable or TooComplex."""
    node = parse(tokens)
    digits = math.ceil(size(node))
    exact = exact_value(node)
    nodes = list(walk(node))
    names = frozenset(one[1] for one in nodes if one[0] == "var")
    rounding = any(one[0] == "call" and one[1] in ("floor", "ceil") and has_variable(one) for one in nodes)
    if rounding and any(one[0] == "num" and max(abs(one[1]).as_integer_ratio()) > _MAX_ROUNDED for one in nodes):
        raise Unreadable("a variable that is rounded, and large numbers: points prove nothing about it")
    # Logarithms, inverse functions, powers with other than integer exponents.
    cuts = [one for one in nodes if one[0] == "call" and (one[1] in ("log", "ln") or one[1].startswith("arc"))]
    cuts += [one for one in nodes if one[0] == "pow" and (one[2][0] != "num" or one[2][1].denominator != 1)]
    branching = any(map(has_variable, cuts))
    calls = [one for one in nodes if one[0] in ("pow", "call")] if exact is None else []
    gamma = any(one[0] == "call" and one[1] in ("factorial", "binomial") for one in calls)
    return Value(node, exact, digits, names, rounding, branching, len(calls), gamma)


def same_value(left: Value, right: Value) -> bool:
    if left.exact is not None and right.exact is not None:
        return left.exact == right.exact
    digits = _precision(left, right)
    return all(a is not None and b is not None and _close(a, b, digits) for a, b in _pairs(left, right, digits))


def proportion(left: Value, right: Value) -> Any:
    """Return the real constant c with left = c * right at every point; None if there is none, or a value is zero."""
    digits = _precision(left, right)
    pairs = list(_pairs(left, right, digits))
    if any(a is None or b is None or _close(a, 0, digits) or _close(b, 0, digits) for a, b in pairs):
        return None
    factors = [a / b for a, b in pairs]
    if not all(_close(factor, factors[0], digits) for factor in factors) or not _close(factors[0].imag, 0, digits):
        return None
    return factors[0].real


def real_value(tokens: Tokens) -> float:
    """Return the value of an expression without variables; raise Unreadable if it is not real."""
    value = value_of(tokens)
    found = None if value.names else _at_point(value, 0, 50)
    if found is None or abs(found.imag) > 1e-20:
        raise Unreadable("no real number")
    return float(found.real)


def rounds_to(value: Value, decimal: Tokens) -> bool:
    """Return True if a real number rounds to `decimal`, a number with or without a minus, at its number of places."""
    if value.names:
        return False
    places = len(decimal[-1].partition(".")[2])
    digits = _precision(value, value_of(decimal))
    found, wanted = _at_point(value, 0, digits), _at_point(value_of(decimal), 0, digits)
    if found is None or not _close(found.imag, 0, digits):
        return False
    context = _context()
    context.dps = 2 * digits
    return bool(abs(found.real - wanted.real) <= context.mpf(10) ** -places / 2)


def _precision(left: Value, right: Value) -> int:
    """Return the number of decimals to compare, in steps of 50, so that most answers share one evaluation of the gold.

    Raises TooComplex if that would take too long; the cost of a call grows with the square of the digits.
    """
    digits = -(-(left.digits + right.digits + _SPARE_DIGITS) // 50) * 50
    if (left.num_calls + right.num_calls) * (digits / 100) ** 2 > _MAX_COST:
        raise TooComplex(f"{left.num_calls + right.num_calls} powers and functions to {digits} digits")
    if (left.gamma or right.gamma) and digits > _MAX_GAMMA_DIGITS:
        raise TooComplex(f"the factorial of a variable to {digits} digits")
    return digits


def _pairs(left: Value, right: Value, digits: int) -> Iterator[tuple[Any, Any]]:
    """Yield both values at each point: one point without variables, no negative point for roots and logarithms."""
    count = _NUM_POINTS - (left.branching or right.branching) if left.names or right.names else 1
    for index in range(count) if not (left.rounding or right.rounding) else _ROUNDED_POINTS:
        a, b = _at_point(left, index, digits), _at_point(right, index, digits)
        # A cached value belongs to the context of the thread that computed it.
        yield (None, None) if a is None or b is None else (_context().mpc(a), _context().mpc(b))


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from walk(child)


def has_variable(node: Node) -> bool:
    return any(one[0] == "var" for one in walk(node))


@lru_cache(maxsize=4096)
def _at_point(value: Value, index: int, digits: int) -> Any:
    """Return the value at one point, to twice the digits that are compared; None if it is not finite."""
    context = _context()
    context.dps = 2 * digits
    point = {}
    for name in value.names:  # A hash of the name, between 0.7 and 1.4, so that `x^{2023}` stays small.
        digest = hashlib.sha256(f"{index}:{name}".encode("utf-8", "backslashreplace")).digest()
        place = 7 * (context.mpf(int.from_bytes(digest[:8], "big")) / 2**64 + 1) / 10
        if index >= _NUM_POINTS:  # Up to about 700; whole at every second point, and for letters such as n.
            place = place * 2 ** (index % 10)
            place = context.ceil(place) if index % 2 or name in "jkmnpqN" else place
        point[name] = -place if index == _NUM_POINTS - 1 else place
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
    if kind == "pow":
        _check_digits(abs(values[1]) * abs(context.mag(values[0] or 1)))
        return context.power(*values)
    return _call(node[1], values, context)


def _check_digits(num_bits: Any) -> None:
    if not num_bits < 4 * MAX_DIGITS:
        raise TooComplex(f"a value of more than {MAX_DIGITS} digits")


def _call(name: str, values: list[Any], context: Any) -> Any:
    """Call mpmath's function of this name."""
    for value in values:
        _check_digits(abs(value) if name in GROWING else context.mag(value or 1))
    if name == "log":
        return context.log(values[0], values[1] if len(values) > 1 else 10)
    own = {"abs": "fabs", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    return getattr(context, own.get(name, name))(*values)


def _close(left: Any, right: Any, digits: int) -> bool:
    context = _context()
    context.dps = 2 * digits
    return bool(abs(left - right) <= max(1, abs(left), abs(right)) * context.mpf(10) ** -digits)

"""Evaluate an expression: exactly if it is rational, else as numbers at fixed points.

Two expressions are the same if they agree at four points, to far more digits than they are written with. For the
expressions of answers, this practically never happens by chance. It takes milliseconds for any answer, while symbolic
simplification may not return. No operation starts whose result would have more than MAX_DIGITS digits.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from trl_ext.rewards.mathematics.parse import parse
from trl_ext.rewards.mathematics.tokens import MAX_DIGITS, Tokens, TooComplex, Unreadable
from trl_ext.rewards.mathematics.tree import LEAVES, Node, has_variable, is_root, operands, walk

_LOG_2 = math.log10(2)
_MAX_BITS = MAX_DIGITS / _LOG_2  # of a value, on either side of the point
_GROWING = frozenset({"factorial", "binomial", "exp", "sinh", "cosh"})  # faster than any power
_ROUNDING = frozenset({"floor", "ceil"})
_BRANCHING = frozenset({"root", "log", "ln", "arcsin", "arccos", "arctan"})  # no value, or another branch, below 0
_MAX_ROOT = 64  # degree of a root that is computed exactly


def _check_bits(num_bits: float | Fraction) -> None:
    if not num_bits < _MAX_BITS:
        raise TooComplex(f"a value of more than {MAX_DIGITS} digits")


# Exact values ----------------------------------------------------------------------------------------------------


def exact_value(node: Node) -> Fraction | None:
    """Return the rational value of a tree; None if the value is not rational; TooComplex above MAX_DIGITS."""
    try:
        found = _exact(node)
    except ZeroDivisionError:
        raise Unreadable("a division by zero") from None
    _check_bits(0 if found is None else _num_bits(found))
    return found


def _exact(node: Node) -> Fraction | None:
    if node[0] == "num":
        number: Fraction = node[1]
        return number
    values = [_exact(operand) for operand in operands(node)]
    known = [value for value in values if value is not None]
    compute = _EXACT.get(node[0])
    return compute(*known) if compute and len(known) == len(values) else None


def _num_bits(number: Fraction) -> int:
    return max(abs(number.numerator), number.denominator).bit_length() - 1


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    degree = exponent.denominator
    if degree == 1:
        _check_bits(abs(exponent.numerator) * _num_bits(base))
        return base**exponent.numerator
    if base < 0 or degree > _MAX_ROOT:
        return None
    top, bottom = _root(base.numerator, degree), _root(base.denominator, degree)
    return None if top is None or bottom is None else _power(Fraction(top, bottom), degree * exponent)


def _root(number: int, degree: int) -> int | None:
    """Return the root of an integer; None if the root is no integer."""
    if number < 2:
        return number
    low, high = 1, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low if low**degree == number else None


def _factorial(number: Fraction) -> Fraction | None:
    if number.denominator > 1 or number < 0:
        return None
    _check_bits(number * (_num_bits(number) + 1))
    return Fraction(math.factorial(int(number)))


def _binomial(number: Fraction, chosen: Fraction) -> Fraction | None:
    if number.denominator > 1 or chosen.denominator > 1 or number < 0 or chosen < 0:
        return None
    _check_bits(min(number, chosen * (_num_bits(number) + 1)))
    return Fraction(math.comb(int(number), int(chosen)))


_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "add": lambda first, *others: sum(others, first),
    "mul": lambda first, *others: math.prod(others, start=first),
    "pow": _power,
    "factorial": _factorial,
    "binomial": _binomial,
    "abs": abs,
    "floor": lambda number: Fraction(math.floor(number)),
    "ceil": lambda number: Fraction(math.ceil(number)),
}


# Values at points ------------------------------------------------------------------------------------------------

_NUM_POINTS = 4  # The last point has negative variables.
_ROUNDED_POINTS = range(_NUM_POINTS, 36)
_MAX_ROUNDED = 50
_SPARE_DIGITS = 20
_STEP_DIGITS = 50  # The precision grows in steps, so that most answers share one evaluation of the gold.
_MAX_COST = 400  # calls at 100 digits; a tenth of a second
_MAX_GAMMA_DIGITS = 100  # The gamma function needs seconds for the first value to a thousand digits.

_local = threading.local()  # An mpmath context holds its precision, so every thread needs a separate context.


@dataclass(frozen=True, slots=True)
class Value:
    """An expression's value, and the cost of evaluating it.

    Args:
        exact: The value if it is rational, else None.
        digits: Sum of the digits of its numbers.
        names: Its variables.
        rounding: True if it rounds a variable; it is then compared at many points, most of them whole.
        branching: True for a logarithm or root of a variable; no negative point is then used.
        num_calls: Number of powers and functions to evaluate; 0 with an exact value.
        gamma: True for a factorial or binomial of other than whole numbers.
    """

    node: Node
    exact: Fraction | None
    digits: float
    names: frozenset[str]
    rounding: bool
    branching: bool
    num_calls: int
    gamma: bool


@lru_cache(maxsize=4096)  # A gold is compared with every completion of its group.
def value_of(tokens: Tokens) -> Value:
    """Return the value of an expression, or raise Unreadable or TooComplex."""
    node = parse(tokens)
    exact = exact_value(node)
    nodes = walk(node)
    numbers = [one[1] for one in nodes if one[0] == "num"]
    calls = [one for one in nodes if one[0] not in LEAVES]
    names = frozenset(one[1] for one in nodes if one[0] == "var")
    kinds = {_kind(one) for one in calls if names and has_variable(one)}
    rounding = bool(_ROUNDING & kinds)
    if rounding and any(max(abs(one).as_integer_ratio()) > _MAX_ROUNDED for one in numbers):
        raise Unreadable("a variable that is rounded, and large numbers: points prove nothing about it")
    costly = [one[0] for one in calls if one[0] not in ("add", "mul") and exact is None]
    return Value(
        node=node,
        exact=exact,
        digits=_LOG_2 * sum(map(_num_bits, numbers)),
        names=names,
        rounding=rounding,
        branching=bool(_BRANCHING & kinds),
        num_calls=len(costly),
        gamma=not {"factorial", "binomial"}.isdisjoint(costly),
    )


def _kind(node: Node) -> str:
    """Return a node's operation, and "root" for a power with other than a whole number as exponent."""
    return "root" if is_root(node) else str(node[0])


def same_value(left: Value, right: Value) -> bool:
    if left.exact is not None and right.exact is not None:
        return left.exact == right.exact
    digits = _precision(left, right)
    return all(a is not None and b is not None and _close(a, b, digits) for a, b in _pairs(left, right, digits))


def proportion(left: Value, right: Value) -> Any:
    """Return the real constant c with left = c * right at every point; None if there is none, or a value is zero."""
    digits = _precision(left, right)
    pairs = list(_pairs(left, right, digits))
    if any(one is None or _close(one, 0, digits) for pair in pairs for one in pair):
        return None
    factors = [a / b for a, b in pairs]
    first = factors[0]
    constant = all(_close(factor, first, digits) for factor in factors) and _close(first.imag, 0, digits)
    return first.real if constant else None


def real_value(tokens: Tokens) -> float:
    """Return the value of an expression without variables; raise Unreadable if it is not real."""
    value = value_of(tokens)
    found = None if value.names else _at_point(value, 0, _STEP_DIGITS).value
    if found is None or abs(found.imag) > 1e-20:
        raise Unreadable("no real number")
    return float(found.real)


def rounds_to(value: Value, decimal: Tokens) -> bool:
    """Return True if a real number rounds to `decimal`, a number with or without a minus, at its number of places."""
    if value.names:
        return False
    places = len(decimal[-1].partition(".")[2])
    digits = _precision(value, value_of(decimal))
    found, wanted = _at_point(value, 0, digits).value, _at_point(value_of(decimal), 0, digits).value
    if found is None or not _close(found.imag, 0, digits):
        return False
    return bool(abs(found.real - wanted.real) <= _context(digits).mpf(10) ** -places / 2)


def _precision(left: Value, right: Value) -> int:
    """Return the number of decimals to compare.

    Raises TooComplex if that would take too long; the cost of a call grows with the square of the digits.
    """
    num_digits = _SPARE_DIGITS + sum(
        value.digits + _LOG_2 * _at_point(value, 0, _STEP_DIGITS).num_bits for value in (left, right)
    )
    digits = _STEP_DIGITS * math.ceil(num_digits / _STEP_DIGITS)
    num_calls = left.num_calls + right.num_calls
    if num_calls * (digits / 100) ** 2 > _MAX_COST:
        raise TooComplex(f"{num_calls} powers and functions to {digits} digits")
    if (left.gamma or right.gamma) and digits > _MAX_GAMMA_DIGITS:
        raise TooComplex(f"the factorial of a variable to {digits} digits")
    return digits


def _pairs(left: Value, right: Value, digits: int) -> Iterator[tuple[Any, Any]]:
    """Yield both values at each point: one point without variables, no negative point for roots and logarithms."""
    points = range(_NUM_POINTS - (left.branching or right.branching))
    if left.rounding or right.rounding:
        points = _ROUNDED_POINTS
    for index in points if left.names or right.names else (0,):
        a, b = _at_point(left, index, digits).value, _at_point(right, index, digits).value
        # A cached value belongs to the context of the thread that computed it.
        yield (None, None) if a is None or b is None else (_context(digits).mpc(a), _context(digits).mpc(b))


class _Sample(NamedTuple):
    """A value at one point, None if it is not finite, and the bits of its largest intermediate."""

    value: Any
    num_bits: int


@lru_cache(maxsize=4096)
def _at_point(value: Value, index: int, digits: int) -> _Sample:
    """Evaluate an expression at one point, to twice the digits that are compared."""
    context = _context(digits)
    variables = {}
    for name in value.names:  # A hash of the name, between 0.7 and 1.4, so that `x^{2023}` stays small.
        digest = hashlib.sha256(f"{index}:{name}".encode("utf-8", "backslashreplace")).digest()
        place = 7 * (context.mpf(int.from_bytes(digest[:8], "big")) / 2**64 + 1) / 10
        if index >= _NUM_POINTS:  # Up to about 700; whole at every second point, and for letters such as n.
            place = place * 2 ** (index % 10)
            place = context.ceil(place) if index % 2 or name in "jkmnpqN" else place
        variables[name] = -place if index == _NUM_POINTS - 1 else place
    point = _Point(context, variables)
    try:
        return _Sample(context.mpc(point.value(value.node)), point.num_bits)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError):  # what mpmath raises outside a domain
        return _Sample(None, point.num_bits)


class _Point:
    """Numbers for variables, and the bits of the largest or smallest value that was computed from them."""

    def __init__(self, context: Any, variables: dict[str, Any]) -> None:
        self.context = context
        self.variables = variables
        self.constants = {"pi": +context.pi, "e": +context.e, "i": context.j}
        self.num_bits = 0

    def value(self, node: Node) -> Any:
        kind, content = node[:2]
        if kind == "num":
            return self.context.mpf(content.numerator) / content.denominator
        if kind in LEAVES:
            return self.variables[content] if kind == "var" else self.constants[content]
        values = [self.value(operand) for operand in operands(node)]
        _check_bits(self.bits_before(kind, values))
        compute = _OPERATIONS.get(kind)
        found = compute(self.context, *values) if compute else getattr(self.context, kind)(*values)
        if not self.context.isfinite(found):
            raise ArithmeticError
        num_bits = abs(self.context.mag(found or 1))
        _check_bits(num_bits)
        self.num_bits = max(self.num_bits, num_bits)
        return found

    def bits_before(self, kind: str, values: list[Any]) -> Any:
        """Estimate the bits that an operation's result needs."""
        if kind == "pow":
            return abs(values[1]) * (abs(self.context.mag(values[0] or 1)) or 0.5)
        return max(map(abs, values)) if kind in _GROWING else 0


_OPERATIONS: dict[str, Callable[..., Any]] = {  # Others have mpmath's names.
    "add": lambda context, *terms: context.fsum(terms),
    "mul": lambda context, *factors: context.fprod(factors),
    "pow": lambda context, base, exponent: context.power(base, exponent),
    "log": lambda context, number, base=10: context.log(number, base),
    "abs": lambda context, number: context.fabs(number),
    "arcsin": lambda context, number: context.asin(number),
    "arccos": lambda context, number: context.acos(number),
    "arctan": lambda context, number: context.atan(number),
}


def _context(digits: int) -> Any:
    """Return this thread's mpmath context, set to twice the digits that are compared."""
    if not hasattr(_local, "context"):
        from mpmath import MPContext

        _local.context = MPContext()
    _local.context.dps = 2 * digits
    return _local.context


def _close(left: Any, right: Any, digits: int) -> bool:
    return bool(abs(left - right) <= max(1, abs(left), abs(right)) * _context(digits).mpf(10) ** -digits)

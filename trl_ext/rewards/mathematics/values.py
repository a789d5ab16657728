"""What an expression is worth: exactly where it is rational, else as numbers at fixed points.

Two expressions are the same when they agree at four points, to far more digits than either spells: for
the sums, products, powers and functions of an answer, that happens by chance as good as never. It costs milliseconds
whatever the answer is, where symbolic simplification may not return.

`size.size` comes first: it bounds the digits of everything that the evaluation meets, from the tree alone.
"""

import hashlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from trl_ext.rewards.mathematics.limits import MAX_DIGITS, TooComplex
from trl_ext.rewards.mathematics.parse import parse
from trl_ext.rewards.mathematics.size import GROWING, exact_value, size
from trl_ext.rewards.mathematics.tokens import Tokens
from trl_ext.rewards.mathematics.tree import Node

_NUM_POINTS = 4  # The last one has negative variables.
_SPARE_DIGITS = 20
_MAX_COST = 400  # calls at 100 digits; a tenth of a second
_MAX_GAMMA_DIGITS = 100  # The gamma function needs seconds for the first value to a thousand digits.

_local = threading.local()  # An mpmath context holds its precision, so every thread needs one of its own.


@dataclass(frozen=True, slots=True)
class Value:
    """An expression's worth.

    `exact` is the rational value, where it has one. `digits` bounds the decimals that the expression spells, `names`
    are its variables, and `branching` tells that a logarithm or a root of one is involved, so that negative points say
    nothing. `num_calls` counts powers and functions, and `gamma` tells of a factorial or binomial that is not of whole
    numbers: what evaluating costs.
    """

    node: Node
    exact: Fraction | None
    digits: int
    names: frozenset[str]
    branching: bool
    num_calls: int
    gamma: bool


@lru_cache(maxsize=4096)  # A gold is compared with every completion of its group.
def value_of(tokens: Tokens) -> Value:
    """The worth of an expression; Unreadable or TooComplex where it has none."""
    node = parse(tokens)
    digits = math.ceil(size(node))
    exact = exact_value(node)
    names, gamma = frozenset(_variables(node)), exact is None and _has_gamma(node)
    return Value(node, exact, digits, names, _branches(node), 0 if exact is not None else _num_calls(node), gamma)


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
    """Decimals to compare, in steps, so that a gold's values are computed once for most answers.

    TooComplex where so many would take too long: a call costs about the square of the digits.
    """
    digits = -(-(left.digits + right.digits + _SPARE_DIGITS) // 50) * 50
    if (left.num_calls + right.num_calls) * (digits / 100) ** 2 > _MAX_COST:
        raise TooComplex(f"{left.num_calls + right.num_calls} powers and functions to {digits} digits")
    if (left.gamma or right.gamma) and digits > _MAX_GAMMA_DIGITS:
        raise TooComplex(f"the factorial of a variable to {digits} digits")
    return digits


def _pairs(left: Value, right: Value, digits: int) -> Iterator[tuple[Any, Any]]:
    """Both values at the points that count: one without variables, no negative ones for roots and logarithms."""
    count = _NUM_POINTS - (left.branching or right.branching) if left.names or right.names else 1
    for index in range(count):
        a, b = _at_point(left, index, digits), _at_point(right, index, digits)
        # Kept values belong to the context of the thread that found them.
        yield (None, None) if a is None or b is None else (_context().mpc(a), _context().mpc(b))


def _variables(node: Node) -> Iterator[str]:
    if node[0] == "var":
        yield node[1]
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from _variables(child)


def _num_calls(node: Node) -> int:
    return (node[0] in ("pow", "call")) + sum(_num_calls(child) for child in node[1:] if isinstance(child, tuple))


def _has_gamma(node: Node) -> bool:
    own = node[0] == "call" and node[1] in ("factorial", "binomial")
    return own or any(_has_gamma(child) for child in node[1:] if isinstance(child, tuple))


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
    """Where a variable stands at a point: between 0.7 and 1.4, so that `x^{2023}` stays small; the same everywhere."""
    digest = hashlib.sha256(f"{index}:{name}".encode("utf-8", "backslashreplace")).digest()
    place = 7 * (context.mpf(int.from_bytes(digest[:8], "big")) / 2**64 + 1) / 10
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
    if kind == "pow":
        _check_digits(abs(values[1]) * abs(context.mag(values[0] or 1)))
        return context.power(*values)
    return _call(node[1], values, context)


def _check_digits(num_bits: Any) -> None:
    if not num_bits < 4 * MAX_DIGITS:
        raise TooComplex(f"a value of more than {MAX_DIGITS} digits")


def _call(name: str, values: list[Any], context: Any) -> Any:
    """mpmath's function of that name, where it has the same one."""
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

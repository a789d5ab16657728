r"""Decide whether an answer is written out, or leaves something to compute.

`345`, `\frac{3}{4}`, `1.5`, `3\sqrt{13}`, `2^{100}`, `\frac{\pi}{2}`, `x^2+2x` are written out. `15 \times 23`,
`\frac{10}{2}`, `5!`, `\sqrt{16}`, `x^2+2x+0`, `2x+3x` have the right value, but leave work to the reader: the tables
`_OF_SUM`, `_OF_PRODUCT`, `_OF_POWER` and `_OF_FUNCTION` name this work. If the gold leaves such work (`2^3 \cdot 5`),
an answer may, too.

An answer must have a form that the task asks for (`text.task.asked_forms`) only if the gold has it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from trl_ext.rewards.mathematics.equal import assignment
from trl_ext.rewards.mathematics.evaluate import exact_value, same_value, value_of
from trl_ext.rewards.mathematics.form import form_of, is_name
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, TooComplex, Unreadable
from trl_ext.rewards.mathematics.tree import (
    LEAVES,
    MINUS_ONE,
    Node,
    has_variable,
    inverse,
    is_inverse,
    is_root,
    is_whole,
    is_whole_power,
    operands,
    parts,
    walk,
)
from trl_ext.rewards.mathematics.units import split_unit

_LARGE = 1_000  # A power of at least this value is a usual answer, such as 2^{10}; nobody writes 5^2 for 25.
_SIMPLER = 1.5  # A simplified answer has at most this many times the numbers and letters of the gold, and one more.
_ZERO, _ONE, _TEN, _I = ("num", 0), ("num", 1), ("num", 10), ("const", "i")
_HALF = inverse(("num", Fraction(2)))
_SQUARES = (4, 9, 25, 49, 121, 169)


@lru_cache(maxsize=4096)  # The completions of a group repeat answers.
def unfit(gold: Tokens, answer: Tokens, asked: frozenset[str] = frozenset()) -> str:
    """Return why an answer that equals the gold has the wrong form; "" if its form is right.

    `asked` are the forms that the task asks for, from `text.task.FORMS`.
    """
    try:
        golden, given = _values(gold, is_gold=True), _values(answer, is_gold=False)
    except (Unreadable, TooComplex):
        return ""  # Only equal words or texts come here.
    pairs = [*zip(golden, given, strict=True)] if len(golden) == len(given) == 1 else []
    reason = ""
    if not any(map(left_to_compute, golden)):
        reason = _first(map(left_to_compute, given)) or _new_functions(golden, given) or _new_numbers(pairs)
    if reason:
        return f"left to compute: {reason}"
    return next((f"not {form}" for form in asked for pair in pairs if not _FITS[form](*pair)), "")


def _values(tokens: Tokens, is_gold: bool) -> list[Tokens]:
    """Return the expressions of an answer and its parts, without names, units and relation signs.

    `x = 2 + 3 = 5` gives the value that is written out; a gold without an unknown (`2 + 3 = 5`) gives each side.
    """
    form = form_of(tokens)
    found = assignment(form)
    if found is not None and (found.unknown or not is_gold):
        others = [side for side in form.parts if side == found.value or not is_name(side)]
        sides = [_values(side, is_gold) for side in (found.value, *others)]
        return min(sides, key=lambda values: any(map(left_to_compute, values)))
    if form.parts:
        return [value for part in form.parts for value in _values(part, is_gold)]
    value, _ = split_unit(form.tokens)
    if value[-2:-1] == ("\\cdot",) and "\\cdot" not in form.tokens:
        value = value[1:-3]  # The number in `3 million` without its factor.
    value_of(value)
    return [value]


def _new_functions(golden: list[Tokens], given: list[Tokens]) -> str:
    """Name a function of numbers that the gold has not."""
    known = {_function(node) for one in golden for node in _tree(one)}
    new = {_function(node) for one in given for node in _tree(one) if not has_variable(node)} - known
    return f"{min(new)} of a number" if new else ""


def _new_numbers(pairs: list[tuple[Tokens, Tokens]]) -> str:
    """Name roots and constants that cancel to exactly the gold's number."""
    for tokens, other_tokens in pairs:
        right, found = value_of(tokens), value_of(other_tokens)
        if right.exact is not None and found.exact is None and same_value(right, found):
            return "a number"
    return ""


def _function(node: Node) -> str:
    """Return a function's name; "" for other nodes and for `\\exp`, which is a power."""
    if node[0] in LEAVES | {"add", "mul", "pow", "exp"}:
        return ""
    return "log" if node[0] == "ln" else str(node[0]).removeprefix("arc")


def _first(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _tree(tokens: Tokens) -> list[Node]:
    return walk(value_of(tokens).node)


def _exact(node: Node) -> Fraction | None:
    try:
        return exact_value(node)
    except Unreadable:
        return None


# Nothing left to compute -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # Called for the gold with every completion of its group.
def left_to_compute(tokens: Tokens) -> str:
    """Name the operation that an expression leaves to compute; "" if it is written out."""
    for before, (one, sign), behind in zip(("", *tokens), pairwise(tokens), (*tokens[2:], ""), strict=False):
        if (one, sign) == ("1", "\\cdot") and before != "/" and behind != "10":
            return "a product with 1"
    return _left(value_of(tokens).node)


def _left(node: Node) -> str:
    if node[0] in LEAVES:
        return ""
    if node[0] == "mul" or is_inverse(node):
        product = Product.of(node)
        if product.is_scientific:
            return ""
        return _rule_of(_OF_PRODUCT, product) or _first(map(_left, product.others))
    return _rule_of(_RULES.get(node[0], _OF_FUNCTION), node) or _first(map(_left, operands(node)))


def _rule_of(rules: tuple[tuple[str, Callable[[Any], bool]], ...], subject: Any) -> str:
    return next((name for name, applies in rules if applies(subject)), "")


def _numbers(factors: list[Node]) -> tuple[Fraction, ...]:
    return tuple(node[1] for node in factors if node[0] == "num" and node != MINUS_ONE)


def _others(factors: list[Node]) -> tuple[Node, ...]:
    return tuple(node for node in factors if node[0] != "num")


@dataclass(frozen=True, slots=True)
class Product:
    """The factors of a product or quotient.

    Args:
        above, below: Numbers, without -1, above and below the line of the fraction.
        others_above, others_below: All other factors.
    """

    above: tuple[Fraction, ...]
    below: tuple[Fraction, ...]
    others_above: tuple[Node, ...]
    others_below: tuple[Node, ...]

    @classmethod
    def of(cls, node: Node) -> "Product":
        factors = parts("mul", node)
        above = [factor for factor in factors if not is_inverse(factor)]
        below = [factor[1] for factor in factors if is_inverse(factor)]
        return cls(_numbers(above), _numbers(below), _others(above), _others(below))

    @property
    def others(self) -> tuple[Node, ...]:
        return self.others_above + self.others_below

    @property
    def powers(self) -> list[Node]:
        """The other factors with a rational value."""
        return [node for node in self.others if _exact(node) is not None]

    @property
    def is_scientific(self) -> bool:
        """True for `6.7 \\cdot 10^5`: a number from 1 to 10, and a whole power of 10."""
        is_power = [node[:2] == ("pow", _TEN) and is_whole(node[2]) for node in self.others_above] == [True]
        one_number = len(self.above) == 1 and not self.below and not self.others_below
        return is_power and one_number and 1 <= abs(self.above[0]) < 10

    @property
    def is_computable(self) -> bool:
        """True if the numbers above and below the line are decimals or fractions, or divide evenly."""
        quotient = Fraction(math.prod(self.above)) / math.prod(self.below)
        fractions = [number for number in self.above + self.below if number.denominator > 1]
        return bool(self.below) and (bool(fractions) or quotient.denominator == 1)

    def repeats(self) -> bool:
        """Return True if two factors have one base, except a sum with variables on one side: `(x+1)(x+1)`."""
        above, below = map(_bases, (self.others_above, self.others_below))
        plain = [base for base in above + below if base[0] != "add"]
        return len({*plain}) < len(plain) or not {*above}.isdisjoint(below)

    def has_like_roots(self) -> bool:
        """Return True if two factors on one side are roots of numbers of one degree."""
        for side in (self.others_above, self.others_below):
            exponents = [node[2] for node in side if node[0] == "pow" and node[1][0] == "num"]
            if len({*exponents}) < len(exponents):
                return True
        return False


def _bases(factors: Iterable[Node]) -> list[Node]:
    return [node[1] if is_whole_power(node) else node for node in factors]


_OF_PRODUCT: tuple[tuple[str, Callable[[Product], bool]], ...] = (
    ("a product with 0", lambda product: 0 in product.above),
    ("a product of numbers", lambda product: len(product.above) + len(product.powers) > 1),
    ("a quotient of numbers", lambda product: len(product.below) + len(product.powers) > 1 or product.is_computable),
    # Programs write `14.0 - 1.0i`.
    ("a product with 1", lambda product: product.above == (1,) and not product.below and product.others != (_I,)
        and not product.others_below),
    ("a product of equal factors", Product.repeats),
    ("a product of sums", lambda product: len([1 for one in product.others if _is_sum_of_numbers(one)]) > 1),
    ("a product of roots", Product.has_like_roots),
)  # fmt: skip
_OF_SUM: tuple[tuple[str, Callable[[Node], bool]], ...] = (
    ("a sum with 0", lambda node: _ZERO in node),
    ("a sum of numbers", lambda node: sum(_exact(term) is not None for term in node[1:]) > 1),
    ("a sum of like terms", lambda node: max(Counter(map(_without_numbers, node[1:])).values()) > 1),
)
_OF_POWER: tuple[tuple[str, Callable[[Node], bool]], ...] = (
    ("the power 0 or 1", lambda node: node[2] in (_ZERO, _ONE)),
    ("a power of a power", lambda node: node[1] == _ONE or _is_power_of_variable(node[1])),
    ("a power of a number", lambda node: is_whole(node[2]) and not has_variable(node[1]) and not _is_usual(node)),
    ("a root of a number", lambda node: not is_whole(node[2]) and _exact(node) is not None),
)
_OF_FUNCTION: tuple[tuple[str, Callable[[Node], bool]], ...] = (
    ("a function of a number", lambda node: not has_variable(node) and _exact(node) is not None),
)
_RULES = {"add": _OF_SUM, "pow": _OF_POWER}


def _is_sum_of_numbers(node: Node) -> bool:
    return node[0] == "add" and not has_variable(node)


def _without_numbers(term: Node) -> tuple[tuple[str, ...], ...]:
    product = Product.of(term)
    return tuple(sorted(map(repr, product.others_above))), tuple(sorted(map(repr, product.others_below)))


def _is_power_of_variable(base: Node) -> bool:
    return base[0] == "pow" and base[2][0] == "num" and not is_inverse(base) and has_variable(base)


def _is_usual(node: Node) -> bool:
    """Return True for a whole power that an answer may have: of pi or e, or a number of at least four digits."""
    if _exact(node[1]) is None:
        return node[1][0] == "const" and node[1] != _I
    value = _exact(node)
    return value is not None and max(abs(value.numerator), value.denominator) >= _LARGE


# Forms that a task asks for ---------------------------------------------------------------------------------------


def _fits_factored(gold: Tokens, answer: Tokens) -> bool:
    """Return False if the gold is a product, and the answer has fewer factors or another rational factor."""
    wanted, found = _Factors.of(gold), _Factors.of(answer)
    if wanted.num_others < 2 and len(wanted.numbers) < 2 and not (wanted.number != 1 and wanted.num_others):
        return True
    if not wanted.num_others:
        return sorted(wanted.numbers) == sorted(found.numbers)
    return found.num_others >= wanted.num_others and abs(found.number) == abs(wanted.number)


@dataclass(frozen=True, slots=True)
class _Factors:
    """The product of a product's rational factors, these one by one (without 1), and the count of the others."""

    number: Fraction
    numbers: list[Fraction]
    num_others: int

    @classmethod
    def of(cls, tokens: Tokens) -> "_Factors":
        number, numbers, num_others = Fraction(1), [], 0
        for factor in parts("mul", value_of(tokens).node):
            base, exponent = (factor[1], int(factor[2][1])) if is_whole_power(factor) else (factor, 1)
            value = _exact(base)
            times = min(abs(exponent), _LARGE)
            if value is None:
                num_others += exponent
                continue
            number *= value ** (times if exponent > 0 else -times)
            numbers += [value] * times
        return cls(number, [one for one in numbers if abs(one) != 1], num_others)


def _is_expanded(tokens: Tokens) -> bool:
    """Return True if no sum is multiplied or raised to a power."""
    return not any(
        factor[0] == "add" and has_variable(factor)
        for node in _tree(tokens)
        for factor in (_factors_above(node) if node[0] == "mul" else _base(node))
    )


def _factors_above(node: Node) -> tuple[Node, ...]:
    return Product.of(node).others_above


def _base(node: Node) -> tuple[Node, ...]:
    """Return the base of a whole power above 1."""
    return node[1:2] if is_whole_power(node) and node[2][1] > 1 else ()


def _is_reduced(tokens: Tokens) -> bool:
    """Return True if fractions of integers are in lowest terms and roots contain no square factor."""
    for node in _tree(tokens):
        product = Product.of(node)
        if any((top / bottom).denominator != abs(bottom) for top in product.above for bottom in product.below):
            return False
        if node[0] == "pow" and node[2] == _HALF and node[1][0] == "num":
            if any(node[1][1] % square == 0 for square in _SQUARES):
                return False
    return True


def _has_bracket(tokens: Tokens) -> bool:
    """Return True if a term of a sum has a sum as its factor, as in `2(x + 1) - 3`."""
    sums = (node for node in _tree(tokens) if node[0] == "add")
    products = (Product.of(term) for node in sums for term in node[1:])
    return any(factor[0] == "add" for product in products for factor in product.others)


def _num_leaves(tokens: Tokens) -> int:
    return sum(node[0] in LEAVES and node != MINUS_ONE for node in _tree(tokens))


def _is_fraction(tokens: Tokens) -> bool:
    return bool({"\\frac", "/"} & {*tokens})


def _is_mixed(tokens: Tokens) -> bool:
    digits = [token for token in tokens if token != "-" and not token.startswith(WORDS)]
    return len(digits) > 1 and digits[0].isdigit() and value_of(tokens).node[0] == "num"


def _is_power_of_ten(tokens: Tokens) -> bool:
    return ("10", "^") in pairwise(tokens)


def _is_polynomial(tokens: Tokens) -> bool:
    """Return True if variables are only added, multiplied and raised to natural powers."""
    return all(node[0] in ("var", "add", "mul") or bool(_base(node)) for node in _tree(tokens) if has_variable(node))


def _is_rationalized(tokens: Tokens) -> bool:
    """Return True if no denominator contains a root."""
    below = [node[1] for node in _tree(tokens) if is_inverse(node)]
    return not any(is_root(node) for one in below for node in walk(one))


def _keeps(is_so: Callable[[Tokens], bool]) -> Callable[[Tokens, Tokens], bool]:
    """Return a test that an answer has a property of the gold."""
    return lambda gold, answer: not is_so(gold) or is_so(answer)


def _of_polynomials(fits: Callable[[Tokens, Tokens], bool]) -> Callable[[Tokens, Tokens], bool]:
    """Return a test that an answer is a polynomial where the gold is, and fits."""
    return lambda gold, answer: _keeps(_is_polynomial)(gold, answer) and fits(gold, answer)


def _fits_simplified(gold: Tokens, answer: Tokens) -> bool:
    if not _keeps(_is_reduced)(gold, answer) or (_has_bracket(answer) and not _has_bracket(gold)):
        return False
    return _num_leaves(answer) <= _SIMPLER * _num_leaves(gold) + 1


_FITS = {
    "factored": _of_polynomials(_fits_factored),
    "expanded": _of_polynomials(_keeps(_is_expanded)),
    "simplified": _of_polynomials(_fits_simplified),
    "rationalized": _keeps(_is_rationalized),
    "a fraction": _keeps(_is_fraction),
    "a decimal": lambda gold, answer: _is_fraction(gold) or not _is_fraction(answer),
    "a mixed number": _keeps(_is_mixed),
    "in scientific notation": _keeps(_is_power_of_ten),
}

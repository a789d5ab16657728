r"""Decide whether an answer is written out, or leaves something to compute.

`345`, `\frac{3}{4}`, `1.5`, `3\sqrt{13}`, `2^{100}`, `\frac{\pi}{2}`, `x^2+2x` are written out. `15 \times 23`,
`\frac{10}{2}`, `5!`, `\sqrt{16}`, `x^2+2x+0`, `2x+3x` have the right value, but leave work to the reader. If the gold
leaves such work (`2^3 \cdot 5`), an answer may, too.

An answer must have a form that the task asks for (`text.task.asked_forms`) only if the gold has it.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from trl_ext.rewards.mathematics.equal import assignment
from trl_ext.rewards.mathematics.evaluate import exact_value, has_variable, same_value, value_of, walk
from trl_ext.rewards.mathematics.form import form_of
from trl_ext.rewards.mathematics.parse import MINUS_ONE, Node
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, TooComplex, Unreadable
from trl_ext.rewards.mathematics.units import split_unit

_LARGE = 1_000  # A power of at least this value is a usual answer, such as 2^{10}; nobody writes 5^2 for 25.
_SIMPLER = 1.5  # A simplified answer has at most this many times the numbers and letters of the gold, and one more.


@lru_cache(maxsize=4096)  # The completions of a group repeat answers.
def unfit(gold: Tokens, answer: Tokens, asked: frozenset[str] = frozenset()) -> str:
    """Return why an answer that equals the gold has the wrong form; "" if its form is right.

    `asked` are the forms that the task asks for, from `text.task.FORMS`.
    """
    try:
        golden, given = _values(gold, is_gold=True), _values(answer, is_gold=False)
    except (Unreadable, TooComplex):
        return ""  # Only equal words or texts come here.
    if not any(left_to_compute(one) for one in golden):
        known = frozenset(_functions(golden, of_numbers=False))
        for one in given:
            new = (f"{name} of a number" for name in _functions([one], of_numbers=True) if name not in known)
            if rest := left_to_compute(one) or next(new, ""):
                return f"left to compute: {rest}"
        if len(golden) == len(given) == 1:
            right, value = value_of(golden[0]), value_of(given[0])
            # Roots or constants that cancel to exactly the gold's number.
            if right.exact is not None and value.exact is None and same_value(right, value):
                return "left to compute: a number"
    if len(golden) == len(given) == 1:
        for form in asked:
            is_polynomial = form in ("factored", "expanded", "simplified") and _is_polynomial(golden[0])
            if (is_polynomial and not _is_polynomial(given[0])) or not _FITS[form](golden[0], given[0]):
                return f"not {form}"
    return ""


def _values(tokens: Tokens, is_gold: bool) -> list[Tokens]:
    """Return the expressions of an answer and its parts, without names, units and relation signs.

    `x = 2 + 3 = 5` gives the value that is written out; a gold without an unknown (`2 + 3 = 5`) gives each side.
    """
    form = form_of(tokens)
    if form.kind == "words":
        return []
    if form.kind == "relation":
        found = assignment(form)
        parts = form.parts
        if found is not None and not (is_gold and not found[0]):
            sides = [found[1], *(part for part in form.parts if part not in (*found,))]
            values = [_values(side, is_gold) for side in sides]
            return next((one for one in values if not any(map(left_to_compute, one))), values[0])
    else:
        parts = form.parts
    if parts:
        return [value for part in parts for value in _values(part, is_gold)]
    value, _ = split_unit(form.tokens)
    if value[-2:-1] == ("\\cdot",) and "\\cdot" not in form.tokens:
        value = value[1:-3]  # The number in `3 million` without its factor.
    value_of(value)
    return [value]


# Nothing left to compute -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # Called for the gold with every completion of its group.
def left_to_compute(tokens: Tokens) -> str:
    """Name the operation that an expression leaves to compute; "" if it is written out."""
    for before, (one, sign), behind in zip(("", *tokens), pairwise(tokens), (*tokens[2:], ""), strict=False):
        if (one, sign) == ("1", "\\cdot") and before != "/" and behind != "10":
            return "a product with 1"
    return _left(value_of(tokens).node)


def _left(node: Node) -> str:
    kind = node[0]
    if kind in ("num", "var", "const"):
        return ""
    if kind == "add":
        terms = list(_terms(node))
        if ("num", 0) in terms:
            return "a sum with 0"
        if sum(_exact(term) is not None for term in terms) > 1:
            return "a sum of numbers"
        # Like terms differ only by a rational factor.
        alike = Counter(repr(sorted((repr(n), inv) for n, inv in _factors(term) if n[0] != "num")) for term in terms)
        return "a sum of like terms" if max(alike.values()) > 1 else _first(map(_left, terms))
    if kind == "mul":
        return _left_of_product(list(_factors(node)))
    if kind == "pow":
        return _left_of_power(node)
    if not has_variable(node) and _exact(node) is not None:
        return f"{node[1]} of a number"
    return _first(map(_left, node[2:]))


def _left_of_product(factors: list[tuple[Node, bool]]) -> str:
    above = [node for node, inverted in factors if not inverted and node[0] == "num" and node != MINUS_ONE]
    below = [node for node, inverted in factors if inverted and node[0] == "num" and node != MINUS_ONE]
    others = [(node, inverted) for node, inverted in factors if node[0] != "num"]
    if not below and _is_scientific(above, others):
        return ""
    if ("num", 0) in above:
        return "a product with 0"
    powers = [node for node, _ in others if _exact(node) is not None]
    if len(above) + len(powers) > 1:
        return "a product of numbers"
    if len(below) > 1 or (below and powers):
        return "a quotient of numbers"
    if below:
        top, bottom = above[0][1] if above else Fraction(1), below[0][1]
        if top.denominator > 1 or bottom.denominator > 1 or bottom == 0 or top % bottom == 0:
            return "a quotient of numbers"
    is_imaginary = others == [(("const", "i"), False)]  # Programs write `14.0 - 1.0i`.
    if above == [("num", 1)] and not below and not is_imaginary and not any(inverted for _, inverted in others):
        return "a product with 1"
    seen: dict[str, bool] = {}
    num_sums, roots = 0, Counter[tuple[str, bool]]()
    for node, inverted in others:
        base = node[1] if node[0] == "pow" and _is_whole(node[2]) else node
        key = repr(base)
        if key in seen and (base[0] != "add" or seen[key] != inverted or not has_variable(base)):
            return "a product of equal factors"
        seen[key] = inverted
        if not has_variable(node):
            num_sums += node[0] == "add"
            if node[0] == "pow" and node[1][0] == "num":
                roots[repr(node[2]), inverted] += 1
    if num_sums > 1:
        return "a product of sums"
    if roots and max(roots.values()) > 1:
        return "a product of roots"
    return _first(_left(node) for node, _ in others)


def _is_scientific(numbers: list[Node], others: list[tuple[Node, bool]]) -> bool:
    """Return True for `6.7 \\cdot 10^5`: a number from 1 to 10, and a whole power of 10 that is not inverted."""
    if len(numbers) != 1 or len(others) != 1:
        return False
    node, inverted = others[0]
    is_power_of_ten = node[0] == "pow" and node[1] == ("num", 10) and _is_whole(node[2])
    return is_power_of_ten and not inverted and 1 <= abs(numbers[0][1]) < 10


def _left_of_power(node: Node) -> str:
    _, base, exponent = node
    if exponent in (("num", 1), ("num", 0)):
        return f"the power {exponent[1]}"
    if base == ("num", 1) or (
        base[0] == "pow" and base[2][0] == "num" and base[2] != MINUS_ONE and has_variable(base)
    ):
        return "a power of a power"
    if _is_whole(exponent) and exponent != MINUS_ONE and not has_variable(base):
        number = _exact(base)
        if number is None:
            return "" if base[0] == "const" and base[1] != "i" else "a power of a number"
        value = _exact(node)
        if value is None or max(abs(value.numerator), value.denominator) < _LARGE:
            return "a power of a number"
        return _left(base)
    if exponent != MINUS_ONE and _exact(node) is not None:
        return "a root of a number"
    return _left(base) or _left(exponent)


def _functions(expressions: list[Tokens], of_numbers: bool) -> Iterator[str]:
    """Yield functions in expressions, with `of_numbers` only of arguments without variables; `\\exp` is a power."""
    for tokens in expressions:
        for node in walk(value_of(tokens).node):
            if node[0] == "call" and node[1] != "exp" and not (of_numbers and has_variable(node)):
                yield "log" if node[1] == "ln" else node[1].removeprefix("arc")


def _first(reasons: Iterator[str]) -> str:
    return next(filter(None, reasons), "")


# Trees -----------------------------------------------------------------------------------------------------------


def _is_whole(node: Node) -> bool:
    return node[0] == "num" and node[1].denominator == 1


def _exact(node: Node) -> Fraction | None:
    try:
        return exact_value(node)
    except Unreadable:
        return None


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum, also of sums within it."""
    for term in node[1:]:
        if term[0] == "add":
            yield from _terms(term)
        else:
            yield term


def _factors(node: Node, inverted: bool = False) -> Iterator[tuple[Node, bool]]:
    """Yield the factors of a product or quotient, and whether one divides."""
    if node[0] == "mul":
        for factor in node[1:]:
            yield from _factors(factor, inverted)
    elif node[0] == "pow" and node[2] == MINUS_ONE:
        yield from _factors(node[1], not inverted)
    else:
        yield node, inverted


# Forms that a task asks for ---------------------------------------------------------------------------------------


def _fits_factored(gold: Tokens, answer: Tokens) -> bool:
    """Return False if the gold is a product, and the answer has fewer factors or another rational factor."""
    wanted, found = _split_factors(gold), _split_factors(answer)
    if sum(wanted[1].values()) < 2 and not (wanted[0] != 1 and wanted[1]) and len(list(wanted[2])) < 2:
        return True
    if not wanted[1]:
        return sorted(wanted[2]) == sorted(found[2])
    return sum(found[1].values()) >= sum(wanted[1].values()) and abs(found[0]) == abs(wanted[0])


def _split_factors(tokens: Tokens) -> tuple[Fraction, Counter[str], list[Fraction]]:
    """Return an expression's rational factor, the count of each other factor, and its numbers one by one."""
    number, others, numbers = Fraction(1), Counter[str](), []
    for node, inverted in _factors(value_of(tokens).node):
        base, times = (node[1], int(node[2][1])) if node[0] == "pow" and _is_whole(node[2]) else (node, 1)
        sign = -1 if inverted else 1
        value = _exact(base)
        if value is None:
            others[repr(base)] += sign * times
        else:
            number *= value ** (sign * times) if value and abs(times) < _LARGE else value
            numbers += [value] * min(abs(times), _LARGE) if abs(value) != 1 else []
    return number, others, numbers


def _is_expanded(tokens: Tokens) -> bool:
    """Return True if no sum is multiplied or raised to a power."""
    for node in walk(value_of(tokens).node):
        if node[0] == "mul" and any(
            factor[0] == "add" and has_variable(factor) and not inverted for factor, inverted in _factors(node)
        ):
            return False
        if node[0] == "pow" and node[1][0] == "add" and has_variable(node[1]) and _is_whole(node[2]):
            if node[2][1] > 1:
                return False
    return True


def _is_reduced(tokens: Tokens) -> bool:
    """Return True if fractions of integers are in lowest terms and roots contain no square factor."""
    for node in walk(value_of(tokens).node):
        if node[0] == "mul":
            above = [one[1] for one, inverted in _factors(node) if one[0] == "num" and not inverted]
            below = [one[1] for one, inverted in _factors(node) if one[0] == "num" and inverted]
            for top in above:
                for bottom in below:
                    if not bottom or abs(Fraction(top) / bottom).denominator != abs(bottom):
                        return False
        if node[0] == "pow" and node[1][0] == "num" and node[2] == ("pow", ("num", 2), MINUS_ONE):
            number = node[1][1]
            if any(number % square == 0 for square in (4, 9, 25, 49, 121, 169)):
                return False
    return True


def _fits_simplified(gold: Tokens, answer: Tokens) -> bool:
    if (_is_reduced(gold) and not _is_reduced(answer)) or (_has_bracket(answer) and not _has_bracket(gold)):
        return False
    return _num_leaves(answer) <= _SIMPLER * _num_leaves(gold) + 1


def _has_bracket(tokens: Tokens) -> bool:
    """Return True if a term of a sum has a sum as its factor, as in `2(x + 1) - 3`."""
    sums = (node for node in walk(value_of(tokens).node) if node[0] == "add")
    return any(factor[0] == "add" for node in sums for term in _terms(node) for factor, _ in _factors(term))


def _num_leaves(tokens: Tokens) -> int:
    return sum(node[0] in ("num", "var", "const") and node != MINUS_ONE for node in walk(value_of(tokens).node))


def _is_fraction(tokens: Tokens) -> bool:
    return bool({"\\frac", "/"} & {*tokens})


def _is_mixed(tokens: Tokens) -> bool:
    digits = [token for token in tokens if token != "-" and not token.startswith(WORDS)]
    return len(digits) > 1 and digits[0].isdigit() and value_of(tokens).node[0] == "num"


def _is_power_of_ten(tokens: Tokens) -> bool:
    return ("10", "^") in pairwise(tokens)


def _is_polynomial(tokens: Tokens) -> bool:
    """Return True if variables are only added, multiplied and raised to natural powers."""
    for node in walk(value_of(tokens).node):
        if node[0] == "pow" and has_variable(node) and not (_is_whole(node[2]) and node[2][1] > 0):
            return False
        if node[0] == "call" and has_variable(node):
            return False
    return True


def _is_rationalized(tokens: Tokens) -> bool:
    """Return True if no denominator contains a root."""
    below = (node[1] for node in walk(value_of(tokens).node) if node[0] == "pow" and node[2] == MINUS_ONE)
    return not any(
        node[0] == "pow" and node[2] != MINUS_ONE and not _is_whole(node[2]) for one in below for node in walk(one)
    )


_FITS = {
    "factored": _fits_factored,
    "expanded": lambda gold, answer: not _is_expanded(gold) or _is_expanded(answer),
    "simplified": _fits_simplified,
    "rationalized": lambda gold, answer: not _is_rationalized(gold) or _is_rationalized(answer),
    "a fraction": lambda gold, answer: not _is_fraction(gold) or _is_fraction(answer),
    "a decimal": lambda gold, answer: _is_fraction(gold) or not _is_fraction(answer),
    "a mixed number": lambda gold, answer: not _is_mixed(gold) or _is_mixed(answer),
    "in scientific notation": lambda gold, answer: not _is_power_of_ten(gold) or _is_power_of_ten(answer),
}

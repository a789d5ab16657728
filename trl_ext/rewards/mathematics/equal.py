r"""Compare two answers strictly, as training needs it.

Two answers are the same if a row of `_SAME` holds: they have the same tokens, the same value, or the same kind and the
same parts. `_READINGS` are other kinds that an answer can be read as, next to an answer of that kind: `x = 5` as 5, or
`x > 3` as an interval. Of an expression that `parse` cannot read, only equal tokens are the same.

A lenient grader accepts these, and they fail here: an equation whose sides disagree (`5 = 3`), an equation that
repeats the task, other units, other brackets, a set for a tuple, `X` for `x`, a decimal that is only near, a base
that is left out (`52` for `52_8`), an anagram (`seat` for `east`).
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from trl_ext.rewards.mathematics.evaluate import Value, proportion, real_value, rounds_to, same_value, value_of
from trl_ext.rewards.mathematics.form import SET_RELATIONS, Form, form_of, is_name, tuple_of, words_of
from trl_ext.rewards.mathematics.spelling import WORDS
from trl_ext.rewards.mathematics.tokens import Tokens, TooComplex, Unreadable, check_answer, is_number, text_of
from trl_ext.rewards.mathematics.units import agree, split_unit

_UNORDERED = frozenset({"list", "set"})
_WRITTEN_EXACTLY = frozenset({"\\frac", "/", "\\sqrt", "\\pi"})  # An answer with such a token is no decimal.
_ROUNDED = re.compile(r"(?:- )?(?=\S*\.)[0.]*[1-9]\.?(?:[0-9]\.?){2,}")  # three digits or more
_VECTORS = (("(", ")"), ("\\langle", "\\rangle"))
_PARAMETERS = frozenset("kmn")
_COUNTS = re.compile(
    r"zero|no|none|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:four|fif|six|seven|eigh|nin|ten)th"
    r"|\w+(?:teen|ty|illion)|dozen|hundred|thousand|first|second|third|half|both|twice|double|single|only|unique|pair"
)
_OPERATORS = frozenset({"\\frac", "/", "\\sqrt", "^", "+", "-", "\\cdot", "!", ":"})
_ENGLISH = frozenset("the is are and of not such that can cannot has have does all any with must exist".split())
_SETS: dict[Tokens, str] = {
    ("\\emptyset",): "nosolution",
    ("\\mathbb{R}",): "allrealnumbers",
    ("(", "-", "\\infty", ",", "\\infty", ")"): "allrealnumbers",
    ("\\infty",): "infinitelymany",
}
_SAME_WORDS = {
    "nosolutions": "nosolution", "nosolutionexists": "nosolution", "noneexist": "nosolution", "emptyset": "nosolution",
    "allreals": "allrealnumbers", "realnumbers": "allrealnumbers", "true": "yes", "false": "no",
    "infinite": "infinitelymany", "dne": "doesnotexist", "undefined": "doesnotexist", "notpossible": "impossible",
}  # fmt: skip
_FLIPPED = {
    "<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq", "\\approx": "\\approx",
    **SET_RELATIONS, **{right: left for left, right in SET_RELATIONS.items()},
}  # fmt: skip
_MAX_PROSE_WORDS = 3  # More words are a sentence, and another sentence may mean the same.
_INFINITY: Tokens = ("\\infty",)
_MINUS_INFINITY: Tokens = ("-", "\\infty")


class Assignment(NamedTuple):
    """An unknown, () in `2 + 3 = 5`, and its value."""

    unknown: Tokens
    value: Tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a comparison.

    `same` is True if the answer is right and False if it is wrong. It is None if the gold can be compared only with
    an equal text. `path` names the test that decided, or what cannot be read.
    """

    same: bool | None
    path: str


_DIFFERENT = Match(False, "different")


def compare(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold; raise TooComplex only if the gold can be compared."""
    mine, theirs = _PARAMETERS & {*gold}, _PARAMETERS & {*answer}
    if "\\pi" in gold and len(mine) == len(theirs) == 1:
        # Use the gold's letter for any whole number: `n\\pi` means the same as `k\\pi`.
        answer = tuple(next(iter(mine)) if token in theirs else token for token in answer)
    try:
        found = match(gold, answer)
    except TooComplex:
        if not why_undecided(gold):
            raise
        found = Match(None, why_undecided(gold))
    if found.same is False and why_undecided(gold) and not _is_other_number(gold, answer):
        return Match(None, why_undecided(gold))
    return found


def _is_other_number(gold: Tokens, answer: Tokens) -> bool:
    """Return True if the answer is a number that the gold, a statement or list that cannot be read, does not hold."""
    words = {word for token in gold if token.startswith(WORDS) for word in token[1:].split()}
    numbers = {token for at, token in enumerate(gold) if is_number(token) and gold[at - 2 : at] != ("_", "{")}
    if any(map(_COUNTS.fullmatch, words)) or (words and numbers and _OPERATORS & {*gold}):
        return False
    try:
        exact = value_of(split_unit(answer)[0]).exact
        is_list = form_of(gold).kind in ("list", "set", "tuple")
    except (Unreadable, TooComplex):
        return False
    is_statement = len(words) > 1 and not _ENGLISH.isdisjoint(words)
    return (is_list or is_statement) and exact is not None and exact not in map(Fraction, numbers)


@lru_cache(maxsize=4096)  # Called for every completion that is not the gold.
def why_undecided(gold: Tokens) -> str:
    """Return why a gold can be compared only with an equal text; "" if other answers can be compared, too."""
    try:
        check_answer(gold)
        return _reason(gold)
    except (TooComplex, Unreadable) as error:
        return str(error)


def _reason(gold: Tokens) -> str:
    form = form_of(gold)
    if form.kind == "words":
        num_words = sum(len(token[1:].split()) if token.startswith(WORDS) else 1 / 3 for token in form.tokens)
        return f"prose of {num_words:.0f} words" if num_words >= _MAX_PROSE_WORDS + 1 else ""
    if form.kind == "numeral":
        return ""
    if form.parts:
        values = (part for part in form.parts if form.kind != "relation" or not is_name(part))
        return next(filter(None, map(_reason, values)), "")
    value, _ = split_unit(form.tokens)
    if value != form.tokens:  # `4:30` of `4:30\\text{ p.m.}`
        return _reason(value)
    found = value_of(value)
    return "" if same_value(found, found) else "no value at the points of comparison"


@lru_cache(maxsize=4096)  # Parts of nested answers are compared again and again.
def match(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold, as far as both can be read; raise TooComplex if that would take too long."""
    if gold == answer:
        return Match(True, "same text")
    left, right = form_of(gold), form_of(answer)
    for name, is_same in _SAME:
        if is_same(left, right):
            return Match(True, name)
    for name, of_gold, of_answer in _READINGS:
        for one in of_gold(left, right):
            if _is_same(one, answer):
                return Match(True, name)
        for one in of_answer(right, left):
            if _is_same(gold, one):
                return Match(True, name)
    return _DIFFERENT


def _is_same(gold: Tokens, answer: Tokens) -> bool:
    return bool(match(gold, answer).same)


def _all_same(gold: Iterable[Tokens], answer: Iterable[Tokens]) -> bool:
    return all(_is_same(*pair) for pair in zip(gold, answer, strict=True))


# Words, numbers and expressions --------------------------------------------------------------------------------------


def _same_words(left: Form, right: Form) -> bool:
    if "words" not in (left.kind, right.kind):
        return False
    words = _words(left)
    return words is not None and words == _words(right)


def _words(form: Form) -> str | None:
    """Return words, or the words for a set, in one spelling; None for anything else."""
    words = _SETS.get(form.tokens) or words_of(form.tokens)
    return words and _SAME_WORDS.get(words, words)


def _is_decimal_comma(left: Form, right: Form) -> bool:
    return right.kind == "list" and left.tokens == (".".join(map("".join, right.parts)),) and is_number(left.tokens[0])


def _same_values(left: Form, right: Form) -> bool:
    kinds = {left.kind, right.kind}  # `4:30` is a ratio and `4:30 p.m.` is not.
    return kinds in ({"scalar"}, {"scalar", "ratio"}) and _same_amounts(left.tokens, right.tokens)


def _same_amounts(gold: Tokens, answer: Tokens) -> bool:
    """Compare two values with or without units."""
    (left, unit), (right, other) = split_unit(gold), split_unit(answer)
    if not agree(unit, other):
        return False
    if (unit or other) and form_of(left).kind != "scalar":
        return _is_same(left, right)
    if (unit, other) == ("percent", "") and _WRITTEN_EXACTLY & {*right}:
        hundredfold = ("100", "\\cdot", "(", *right, ")")
        return _is_equal(left, hundredfold) or _is_equal(left, right)
    # `90^\\circ` is `\\pi/2`: a gold with pi and without a unit is in radians.
    if (unit, other) == ("", "degree") and "\\pi" in left:
        right = ("(", *right, ")", "\\cdot", "\\pi", "/", "180")
    return _is_equal(left, right)


def _is_equal(left: Tokens, right: Tokens) -> bool:
    try:
        wanted, found = value_of(left), value_of(right)
    except Unreadable:
        return False
    if same_value(wanted, found):
        return True
    is_exact = not _WRITTEN_EXACTLY.isdisjoint(right)
    return is_exact and _ROUNDED.fullmatch(text_of(left)) is not None and rounds_to(found, left)


def _same_ratios(left: Form, right: Form) -> bool:
    """Compare a ratio of two parts with its quotient."""
    kinds = {left.kind, right.kind} == {"ratio", "scalar"}
    return kinds and len(left.parts + right.parts) == 2 and _same_amounts(_quotient(left), _quotient(right))


def _quotient(form: Form) -> Tokens:
    if form.kind != "ratio":
        return form.tokens
    top, bottom = form.parts
    return ("\\frac", "{", *top, "}", "{", *bottom, "}")


# Lists, sets, unions, tuples and matrices ----------------------------------------------------------------------------


def _same_parts(left: Form, right: Form) -> bool:
    """Compare answers with parts, and numerals, part by part."""
    if left.kind in ("scalar", "words", "relation") or not _is_alike(left, right):
        return False
    parts = right.parts
    if left.kind in _UNORDERED and len({*left.parts}) == len(left.parts):
        parts = tuple(dict.fromkeys(parts))  # A repeated solution counts once.
    if len(left.parts) != len(parts):
        return False
    if left.kind in ("list", "set", "union") and not _names_order(left, right):
        return _same_in_any_order(left.parts, parts)
    return _all_same(left.parts, parts)


def _is_alike(left: Form, right: Form) -> bool:
    same_kind = (left.kind, left.signs) == (right.kind, right.signs) or {left.kind, right.kind} <= _UNORDERED
    return same_kind or (_is_vector(left) and _is_vector(right))


def _is_vector(form: Form) -> bool:
    r"""Return True for the spellings of a vector: `(1, 2)`, `\langle 1, 2 \rangle`, a column."""
    return form.signs in _VECTORS or (form.kind == "matrix" and {*form.signs} == {"1"})


def _names_order(gold: Form, answer: Form) -> bool:
    """Return True if the gold names its values by different letters, and the answer gives only values."""
    letters = {name[:1] for name, _ in _names_and_values(gold)}
    has_names = any(form_of(part).kind == "relation" for part in answer.parts)
    return not has_names and len(letters) == len(gold.parts) > 1


def _names_and_values(form: Form) -> list[Assignment]:
    """Return the names and values of a list such as `x = 5, y = 2`."""
    found = map(assignment, map(form_of, form.parts)) if form.kind == "list" else ()
    return [*filter(None, found)]


def _same_in_any_order(gold: tuple[Tokens, ...], answer: tuple[Tokens, ...]) -> bool:
    rest = list(answer)
    for part in gold:
        found = next((other for other in rest if _is_same(part, other)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


# Relations -----------------------------------------------------------------------------------------------------------


def assignment(form: Form) -> Assignment | None:
    """Return the unknown and its value in `x = 5`, `5 = x`, `x = y = 5`, `x = 2 + 3 = 5` or `2 + 3 = 5`.

    Returns None for any other form, for sides that disagree, and for an approximation that is not a rounding.
    """
    signs, sides = form.signs, form.parts
    if form.kind != "relation" or not {*signs} <= {"=", "\\approx"}:
        return None
    if "\\approx" not in signs and is_name(sides[-1]) and not is_name(sides[0]):
        sides = sides[::-1]
    num_names = next((place for place, side in enumerate(sides) if not is_name(side)), len(sides) - 1)
    unknown = tuple(token for side in sides[:num_names] for token in ("=", *side))[1:]
    place = signs.index("\\approx") + 1 if "\\approx" in signs else len(sides)
    exact, rounded = sides[num_names : max(place, num_names + 1)], sides[max(place, num_names + 1) :]
    agrees = all(_is_same(exact[0], value) for value in exact[1:])
    agrees = agrees and all(_is_rounding(exact[-1], value) for value in rounded)
    return Assignment(unknown, exact[-1]) if agrees else None


def _is_rounding(exact: Tokens, decimal: Tokens) -> bool:
    """Return True if an expression rounds to a decimal, with or without a unit."""
    number = split_unit(decimal)[0]
    try:
        is_decimal = is_number(number[-1]) and number[:-1] in ((), ("-",))
        return is_decimal and rounds_to(value_of(split_unit(exact)[0]), number)
    except (Unreadable, IndexError):
        return False


def _is_constant(tokens: Tokens) -> bool:
    """Return True for a value without variables: its assignment is a solution, other equations are not."""
    try:
        return not value_of(split_unit(tokens)[0]).names
    except Unreadable:
        return True


def _same_assignments(left: Form, right: Form) -> bool:
    if not _are_relations(left, right) or "\\approx" in left.signs:
        return False
    gold, answer = assignment(left), assignment(right)
    if gold is None or answer is None or not gold.unknown or not answer.unknown:
        return False
    value = _rename(gold.unknown, answer.unknown, answer.value)
    return value is not None and _is_same(gold.value, value)


def _rename(gold: Tokens, answer: Tokens, value: Tokens) -> Tokens | None:
    """Return the answer's value in the gold's letters, since `f(x) = x` means `f(z) = z`; None for other names."""
    if [token.removeprefix(WORDS) for token in gold] == [token.removeprefix(WORDS) for token in answer]:
        return value
    is_function = len(gold) == len(answer) == 4 and gold[:2] == answer[:2] and gold[1] == "("
    if not is_function or gold[2] in value:
        return None
    return tuple({answer[2]: gold[2]}.get(token, token) for token in value)


def _same_names(left: Form, right: Form) -> bool:
    """Return True for sides that are equal to one another, in any order: `AB = CD`."""
    are_equal = _are_relations(left, right) and {*left.signs, *right.signs} == {"="}
    return are_equal and sorted(left.parts) == sorted(right.parts)


def _same_sides(left: Form, right: Form) -> bool:
    if not _are_equations(left, right):
        return False
    readings = ((right.signs, right.parts), (_mirror(right.signs), right.parts[::-1]))
    return any(signs == left.signs and _all_same(left.parts, parts) for signs, parts in readings)


def _are_multiples(left: Form, right: Form) -> bool:
    """Compare two relations by the differences of their sides: `2x - 4y = 6` is a multiple of `x = 2y + 3`."""
    if not _are_equations(left, right) or len(left.parts) != 2 or len(right.parts) != 2:
        return False
    try:
        factor = proportion(_difference(left), _difference(right))
    except Unreadable:
        return False
    return factor is not None and left.signs == (right.signs if factor > 0 else _mirror(right.signs))


def _mirror(signs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_FLIPPED[sign] for sign in reversed(signs))


def _difference(relation: Form) -> Value:
    first, second = relation.parts
    return value_of(("(", *first, ")", "-", "(", *second, ")"))


def _are_relations(left: Form, right: Form) -> bool:
    return left.kind == right.kind == "relation"


def _are_equations(left: Form, right: Form) -> bool:
    """Return True for two relations unless the gold is a solution, `x = 5`, to which `2x = 10` has still to come."""
    if not _are_relations(left, right):
        return False
    gold = assignment(left)
    return gold is None or not gold.unknown or not _is_constant(gold.value)


_SAME: tuple[tuple[str, Callable[[Form, Form], bool]], ...] = (
    ("same text", lambda left, right: left.tokens == right.tokens),
    ("same text", _same_words),
    ("decimal comma", _is_decimal_comma),
    ("value", _same_values),
    ("ratio", _same_ratios),
    ("parts", _same_parts),
    ("assignment", _same_assignments),
    ("names that are equal", _same_names),
    ("sides of a relation", _same_sides),
    ("multiple of a relation", _are_multiples),
)


# Other kinds that an answer can be read as ---------------------------------------------------------------------------


def _values_of_gold(form: Form, other: Form) -> list[Tokens]:
    r"""Read `x = 5` as 5, and `x = \frac13 \approx 0.33` as either value, next to a relation as `x = 0.33`."""
    if form.kind == "list" and other.kind == "relation" and other.parts[0][:1] == ("(",):
        return [tuple_of(form.parts)]  # next to `(x, y) = (1, 2)`
    if form.kind != "relation":
        return []
    if "\\approx" in form.signs:
        name = (*form.parts[0], "=") if other.kind == "relation" else ()
        return [(*name, *part) for part in form.parts if not is_name(part)]
    return _values_of_answer(form, other)


def _values_of_answer(form: Form, other: Form) -> list[Tokens]:
    found = assignment(form) if other.kind != "relation" else None
    return [found.value] if found else []


def _intervals(form: Form, other: Form) -> list[Tokens]:
    r"""Read `1 < x \leq 2` as `(1, 2]`, `x > 3` as `(3, \infty)`, `x \neq 3` as a union."""
    found = _interval(form) if form.kind == "relation" and other.kind in ("tuple", "union", "words") else None
    return [found] if found else []


def _certain_intervals(form: Form, other: Form) -> list[Tokens]:
    """Read an answer as an interval only next to a gold that is no point, as `(1, 2)` may be."""
    return _intervals(form, other) if {"[", "]", "\\infty"} & {*other.tokens} else []


def _interval(relation: Form) -> Tokens | None:
    signs, parts = relation.signs, relation.parts
    if signs == ("\\neq",):
        return (*tuple_of([_MINUS_INFINITY, parts[1]]), "\\cup", *tuple_of([parts[1], _INFINITY]))
    if signs[0] in (">", "\\geq"):
        signs, parts = _mirror(signs), parts[::-1]
    if len(parts) == 2 and is_name(parts[0]):
        signs, parts = ("<", *signs), (_MINUS_INFINITY, *parts)
    if len(parts) == 2:
        signs, parts = (*signs, "<"), (*parts, _INFINITY)
    opening, closing = {"<": "(", "\\leq": "["}.get(signs[0]), {"<": ")", "\\leq": "]"}.get(signs[-1])
    if opening is None or closing is None or len(parts) != 3 or not is_name(parts[1]):
        return None
    return (opening, *parts[0], ",", *parts[2], closing)


def _unions(form: Form, other: Form) -> list[Tokens]:
    """Read the list `x < 1, x = 3, x > 5` as a union, next to a union, if no two parts overlap.

    Overlapping parts are meant to be joined by "and", so they mean their intersection.
    """
    if form.kind != "list" or other.kind != "union":
        return []
    pieces = [_piece(form_of(part)) for part in form.parts]
    try:
        ends = sorted(map(_ends, pieces))
    except Unreadable:
        return []
    if any(before[-1] > after[0] for before, after in pairwise(ends)):
        return []
    return [tuple(token for piece in pieces for token in ("\\cup", *piece))[1:]]


def _piece(part: Form) -> Tokens:
    """Return an equation or inequality as a set of numbers; () for anything else."""
    if part.kind != "relation":
        return ()
    return ("\\{", *part.parts[1], "\\}") if part.signs == ("=",) else _interval(part) or ()


def _ends(piece: Tokens) -> list[float]:
    infinite = {_INFINITY: math.inf, _MINUS_INFINITY: -math.inf}
    found = [infinite.get(end) or real_value(end) for end in form_of(piece).parts]
    if not found:
        raise Unreadable("no interval")
    return found


def _points(form: Form, other: Form) -> list[Tokens]:
    """Read `x = 5, y = 2, x = 3, y = 1` as `(5, 2), (3, 1)`, next to points."""
    names, values = zip(*_names_and_values(form), strict=True) if _names_and_values(form) else ((), ())
    size = len({*names})
    if size < 2 or len(names) < len(form.parts) or names != names[:size] * (len(names) // size):
        return []
    points = [tuple_of(values[start : start + size]) for start in range(0, len(values), size)]
    is_next_to_points = other.kind == ("tuple" if len(points) == 1 else "list")
    return [tuple_of(points)[1:-1]] if is_next_to_points else []


_READINGS: tuple[tuple[str, Callable[[Form, Form], list[Tokens]], Callable[[Form, Form], list[Tokens]]], ...] = (
    ("value", _values_of_gold, _values_of_answer),
    ("interval", _intervals, _certain_intervals),
    ("union", _unions, _unions),
    ("points", _points, _points),
)

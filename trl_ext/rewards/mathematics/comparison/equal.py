r"""Compare two answers strictly, as training needs it.

Two answers are the same when they have the same text (after `tokens`), the same form with the same parts, or, for
expressions, the same value; the cheap tests come first. math-verify decides about expressions that this package does
not read (`library`).

These pass a lenient grader and fail here: equations whose sides disagree (`5 = 3`), an equation that is the task
again instead of its solution, other units, other brackets, a set for a tuple, `X` for `x`, decimals that are only
near, a base that is left out (`52` for `52_8`), an anagram (`seat` for `east`).
"""

from dataclasses import dataclass
from functools import lru_cache

from trl_ext.rewards.mathematics.bounds import TooComplex, Unreadable
from trl_ext.rewards.mathematics.comparison import library as math_library
from trl_ext.rewards.mathematics.comparison.gate import check_for_library
from trl_ext.rewards.mathematics.evaluate import Value, proportion, same_value, value_of
from trl_ext.rewards.mathematics.form import Form, form_of, is_variable, words_of
from trl_ext.rewards.mathematics.tokens import Tokens
from trl_ext.rewards.mathematics.units import agree, split_unit

_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}
_UNORDERED = frozenset({"list", "set"})


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a comparison.

    `same` is True when the answer is the gold, False when it is not, and None when nothing but the gold's own text can
    be compared with it, which its text alone tells. `path` names the test that decided, or says what is not read.
    """

    same: bool | None
    path: str


_SAME_TEXT = Match(True, "same text")
_DIFFERENT = Match(False, "different")
_MAX_PROSE_WORDS = 3  # More words are a sentence, and another sentence may say the same.


def compare(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold; TooComplex is raised only for a gold that can be compared."""
    try:
        found = match(gold, answer)
    except TooComplex:
        if why_undecided(gold):
            return Match(None, why_undecided(gold))
        raise
    return found if found.same or not why_undecided(gold) else Match(None, why_undecided(gold))


@lru_cache(maxsize=4096)  # Asked again for every completion that is not the gold.
def why_undecided(gold: Tokens) -> str:
    """Say why no answer but one of the same text can be compared with a gold; "" where others can."""
    try:
        return _undecided(gold)
    except TooComplex as error:
        return str(error)


def _undecided(gold: Tokens) -> str:
    form = form_of(gold)
    if form.kind == "words":
        num_words = sum(len(token.split()) for token in form.tokens)
        return f"prose of {num_words} words" if num_words > _MAX_PROSE_WORDS else ""
    if form.kind == "numeral":
        return ""
    if form.parts:
        return next((reason for reason in map(_undecided, form.parts) if reason), "")
    value, _ = split_unit(form.tokens)
    try:
        found = value_of(value)
    except Unreadable as error:
        if not math_library.can_read(value, value):
            return str(error)
        check_for_library(value)
        return "" if math_library.same_expression(value, value) else str(error)
    return "" if same_value(found, found) else "no value at the points of comparison"


def match(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold; raise TooComplex where either would take too long."""
    if gold == answer:
        return _SAME_TEXT
    left, right = form_of(gold), form_of(answer)
    if left.tokens == right.tokens:
        return _SAME_TEXT
    if left.kind == "words" or right.kind == "words":
        words = words_of(left.tokens)
        return _SAME_TEXT if words is not None and words == words_of(right.tokens) else _DIFFERENT
    if left.kind == "numeral" or right.kind == "numeral":
        return Match(left.kind == right.kind and left.signs == right.signs, "digits of a base")
    if left.kind == "relation" or right.kind == "relation":
        return _match_relations(left, right)
    if left.kind == right.kind == "scalar":
        return _match_scalars(left.tokens, right.tokens)
    return _match_parts(left, right)


def _match_scalars(gold: Tokens, answer: Tokens) -> Match:
    """Compare two expressions with or without units."""
    left, unit = split_unit(gold)
    right, other = split_unit(answer)
    if not agree(unit, other):
        return Match(False, f"unit '{other}' instead of '{unit}'")
    if unit or other:
        return match(left, right)
    try:
        a, b = value_of(left), value_of(right)
    except Unreadable as error:
        if not math_library.can_read(left, right):
            return Match(False, f"cannot be compared: {error}")
        check_for_library(left)
        check_for_library(right)
        return Match(math_library.same_expression(left, right), "math-verify")
    if a.exact is not None and b.exact is not None:
        return Match(a.exact == b.exact, "exact number")
    return Match(same_value(a, b), "value")


def _match_parts(left: Form, right: Form) -> Match:
    """Compare lists, sets, unions, tuples and matrices part by part."""
    unordered = left.kind in _UNORDERED and right.kind in _UNORDERED
    alike = unordered or (left.kind == right.kind and left.signs == right.signs)
    if not alike or len(left.parts) != len(right.parts):
        return _DIFFERENT
    if unordered or left.kind == "union":
        same = _same_in_any_order(left.parts, right.parts)
    else:
        same = all(match(*pair).same for pair in zip(left.parts, right.parts, strict=True))
    return Match(same, f"parts of a {left.kind}")


def _same_in_any_order(gold: tuple[Tokens, ...], answer: tuple[Tokens, ...]) -> bool:
    rest = list(answer)
    for part in gold:
        found = next((other for other in rest if match(part, other).same), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _match_relations(left: Form, right: Form) -> Match:
    """Compare a relation with a relation, or with the value or interval that one of the two stands for."""
    if left.kind == right.kind:
        return _match_two_relations(left, right)
    relation, other = (left, right) if left.kind == "relation" else (right, left)
    found = assignment(relation)
    value = found[1] if found and (found[0] or relation is right) else None
    if found is None and any(sign in other.tokens for sign in ("[", "]", "\\infty")):
        value = interval(relation)
    if value is None:
        return _DIFFERENT
    return match(value, other.tokens) if relation is left else match(other.tokens, value)


def assignment(relation: Form) -> tuple[Tokens, Tokens] | None:
    """Return the unknown and its value in `x = 5`, `5 = x` or `x = 2 + 3 = 5`; the unknown is () in `2 + 3 = 5`.

    None for any other relation, and for sides that disagree.
    """
    if set(relation.signs) != {"="}:
        return None
    sides = relation.parts if is_variable(relation.parts[0]) else relation.parts[::-1]
    unknown, values = (sides[0], sides[1:]) if is_variable(sides[0]) else ((), relation.parts)
    if not all(match(values[0], value).same for value in values[1:]):
        return None
    return unknown, values[-1]


def interval(relation: Form) -> Tokens | None:
    """Return `1 < x \\leq 2` as `(1, 2]` and `x > 3` as `(3, \\infty)`; None for any other relation."""
    signs, parts = relation.signs, relation.parts
    if signs[0] in (">", "\\geq"):
        signs, parts = tuple(_FLIPPED[sign] for sign in reversed(signs)), parts[::-1]
    if not set(signs) <= {"<", "\\leq"}:
        return None
    if len(parts) == 2:
        infinite = ("-", "\\infty") if is_variable(parts[0]) else ("\\infty",)
        parts = (infinite, *parts) if is_variable(parts[0]) else (*parts, infinite)
        signs = ("<", *signs) if len(infinite) == 2 else (*signs, "<")
    if len(parts) != 3 or not is_variable(parts[1]):
        return None
    opening, closing = "[" if signs[0] == "\\leq" else "(", "]" if signs[1] == "\\leq" else ")"
    return (opening, *parts[0], ",", *parts[2], closing)


def _match_two_relations(left: Form, right: Form) -> Match:
    gold, answer = assignment(left), assignment(right)
    if gold and answer and gold[0] and answer[0]:
        same = gold[0] == answer[0] and match(gold[1], answer[1]).same
        if same or _is_constant(gold[1]):
            return Match(same, "assignment")
    elif gold and gold[0] and _is_constant(gold[1]):
        return Match(False, "an equation, but not solved")
    same = any(
        signs == left.signs and _same_in_order(left.parts, parts)
        for signs, parts in (
            (right.signs, right.parts),
            (tuple(_FLIPPED[sign] for sign in reversed(right.signs)), right.parts[::-1]),
        )
    )
    return Match(True, "sides of a relation") if same else _match_multiples(left, right)


def _same_in_order(left: tuple[Tokens, ...], right: tuple[Tokens, ...]) -> bool:
    return len(left) == len(right) and all(match(*pair).same for pair in zip(left, right, strict=True))


def _is_constant(tokens: Tokens) -> bool:
    """Return True for a value without variables: assigning it is a solution, which no other equation replaces."""
    try:
        return not value_of(split_unit(tokens)[0]).names
    except Unreadable:
        return True


def _match_multiples(left: Form, right: Form) -> Match:
    """Compare two relations by the differences of their sides: `2x - 4y = 6` is a multiple of `x = 2y + 3`."""
    if len(left.parts) != 2 or len(right.parts) != 2:
        return _DIFFERENT
    try:
        factor = proportion(_difference(left), _difference(right))
    except Unreadable:
        return _DIFFERENT
    if factor is None:
        return _DIFFERENT
    sign = right.signs[0] if factor > 0 else _FLIPPED[right.signs[0]]
    return Match(left.signs[0] == sign, "multiple of a relation")


def _difference(relation: Form) -> Value:
    first, second = relation.parts
    return value_of(("(", *first, ")", "-", "(", *second, ")"))

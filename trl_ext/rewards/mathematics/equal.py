r"""Compare two answers strictly, as training needs it.

Two answers are the same if they have the same tokens, the same form with the same parts, or, for expressions, the
same value. The cheap tests come first. Of an expression that `parse` cannot read, only equal tokens are the same.

A lenient grader accepts these, and they fail here: an equation whose sides disagree (`5 = 3`), an equation that
repeats the task, other units, other brackets, a set for a tuple, `X` for `x`, a decimal that is only near, a base
that is left out (`52` for `52_8`), an anagram (`seat` for `east`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from trl_ext.rewards.mathematics.evaluate import Value, proportion, real_value, rounds_to, same_value, value_of
from trl_ext.rewards.mathematics.form import SET_RELATIONS, Form, form_of, is_name, is_variable, words_of
from trl_ext.rewards.mathematics.spelling import WORDS
from trl_ext.rewards.mathematics.tokens import Tokens, TooComplex, Unreadable, check_answer, is_number, is_symbol
from trl_ext.rewards.mathematics.units import agree, split_unit

_UNORDERED = frozenset({"list", "set"})
_WRITTEN_EXACTLY = frozenset({"\\frac", "/", "\\sqrt", "\\pi"})  # An answer with such a token is no decimal.
_ROUNDED_DIGITS = 3
_HALF_DAYS = frozenset({WORDS + "morning", WORDS + "afternoon"})
_PARAMETERS = frozenset("kmn")
_COUNTS = re.compile(
    r"zero|no|none|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:four|fif|six|seven|eigh|nin|ten)th"
    r"|\w+(?:teen|ty|illion)|dozen|hundred|thousand|first|second|third|half|both|twice|double|single|only|unique|pair"
)
_OPERATORS = frozenset({"\\frac", "/", "\\sqrt", "^", "+", "-", "\\cdot", "!", ":"})
_ENGLISH = frozenset("the is are and of not such that can cannot has have does all any with must exist".split())
_SETS = {"\\emptyset": "nosolution", "\\mathbb{R}": "allrealnumbers", "\\infty": "infinitelymany"}
_SAME_WORDS = {
    "nosolutions": "nosolution", "nosolutionexists": "nosolution", "noneexist": "nosolution", "emptyset": "nosolution",
    "allreals": "allrealnumbers", "realnumbers": "allrealnumbers", "true": "yes", "false": "no",
    "infinite": "infinitelymany", "dne": "doesnotexist", "undefined": "doesnotexist", "notpossible": "impossible",
}  # fmt: skip
_FLIPPED = {
    "<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq", "\\approx": "\\approx",
    **SET_RELATIONS, **{right: left for left, right in SET_RELATIONS.items()},
}  # fmt: skip
_ALL_NUMBERS = ("(", "-", "\\infty", ",", "\\infty", ")")


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a comparison.

    `same` is True if the answer is right and False if it is wrong. It is None if the gold can be compared only with
    an equal text. `path` names the test that decided, or what cannot be read.
    """

    same: bool | None
    path: str


_SAME_TEXT = Match(True, "same text")
_DIFFERENT = Match(False, "different")
_MAX_PROSE_WORDS = 3  # More words are a sentence, and another sentence may mean the same.


def compare(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold; raise TooComplex only if the gold can be compared."""
    mine, theirs = _PARAMETERS & {*gold}, _PARAMETERS & {*answer}
    if "\\pi" in gold and len(mine) == len(theirs) == 1 and mine != theirs:
        # Use the gold's letter for any whole number: `n\\pi` means the same as `k\\pi`.
        answer = tuple(next(iter(mine)) if token in theirs else token for token in answer)
    try:
        found = match(gold, answer)
    except TooComplex:
        if why_undecided(gold):
            return Match(None, why_undecided(gold))
        raise
    reason = why_undecided(gold)
    if found.same or not reason:
        return found
    return _DIFFERENT if _is_other_number(gold, answer) else Match(None, reason)


def _is_other_number(gold: Tokens, answer: Tokens) -> bool:
    """Return True if the answer is a number that the gold, a statement or list that cannot be read, does not hold."""
    words = {word for token in gold if token.startswith(WORDS) for word in token[1:].split()}
    numbers = {token for at, token in enumerate(gold) if is_number(token) and gold[at - 2 : at] != ("_", "{")}
    if any(map(_COUNTS.fullmatch, words)) or (words and numbers and _OPERATORS & {*gold}):
        return False
    try:
        exact, form = value_of(split_unit(answer)[0]).exact, form_of(gold)
        if exact is None or not (form.kind in ("list", "set", "tuple") or (len(words) > 1 and _ENGLISH & words)):
            return False
        return exact not in map(Fraction, numbers) if words else not any(match(x, answer).same for x in form.parts)
    except (Unreadable, TooComplex):
        return False


@lru_cache(maxsize=4096)  # Called for every completion that is not the gold.
def why_undecided(gold: Tokens) -> str:
    """Return why a gold can be compared only with an equal text; "" if other answers can be compared, too."""
    try:
        check_answer(gold)
        return _undecided(gold)
    except TooComplex as error:
        return str(error)


def _undecided(gold: Tokens) -> str:
    form = form_of(gold)
    if form.kind == "words":
        num_words = sum(len(token[1:].split()) if token.startswith(WORDS) else 1 / 3 for token in form.tokens)
        return f"prose of {num_words:.0f} words" if num_words >= _MAX_PROSE_WORDS + 1 else ""
    if form.kind == "numeral" or (form.tokens[:1] == ("\\angle",) and is_name(form.tokens)):
        return ""
    if form.parts:
        unnamed = [part for part in form.parts if form.kind != "relation" or not is_name(part)]
        return next((reason for reason in map(_undecided, unnamed) if reason), "")
    value, _ = split_unit(form.tokens)
    if value != form.tokens and form_of(value).kind != "scalar":  # `4:30` of `4:30\\text{ p.m.}`
        return _undecided(value)
    try:
        found = value_of(value)
    except Unreadable as error:
        return str(error)
    return "" if same_value(found, found) else "no value at the points of comparison"


def match(gold: Tokens, answer: Tokens) -> Match:
    """Compare an answer with the gold, as far as both can be read; raise TooComplex if that would take too long."""
    if gold == answer:
        return _SAME_TEXT
    left, right = form_of(gold), form_of(answer)
    if left.tokens == right.tokens:
        return _SAME_TEXT
    if (
        right.kind == "list"
        and len(gold) == 1
        and gold[0] == ".".join(map("".join, right.parts))
        and is_number(gold[0])
    ):
        return Match(True, "decimal comma")
    kinds = {left.kind, right.kind}
    if "words" in kinds and "relation" not in kinds:
        words = _words(left)
        return _SAME_TEXT if words is not None and words == _words(right) else _DIFFERENT
    if "relation" in kinds:
        return _match_relations(left, right)
    if "numeral" in kinds:
        return Match(left.kind == right.kind and left.signs == right.signs, "digits of a base")
    if kinds == {"scalar"} or (kinds == {"scalar", "ratio"} and _HALF_DAYS & {*left.tokens, *right.tokens}):
        return _match_scalars(left.tokens, right.tokens)
    if "ratio" in kinds:
        return _match_ratios(left, right)
    return _match_parts(left, right)


def _words(form: Form) -> str | None:
    """Return words, or the words for a set, in one spelling; None for anything else."""
    if form.kind == "tuple":
        return "allrealnumbers" if form.tokens == _ALL_NUMBERS else None
    if len(form.tokens) == 1 and form.tokens[0] in _SETS:
        return _SETS[form.tokens[0]]
    words = words_of(form.tokens)
    return words and _SAME_WORDS.get(words, words)


def _match_scalars(gold: Tokens, answer: Tokens) -> Match:
    left, unit = split_unit(gold)
    right, other = split_unit(answer)
    if not agree(unit, other):
        return Match(False, f"unit '{other}' instead of '{unit}'")
    if (unit, other) == ("percent", "") and _WRITTEN_EXACTLY & {*right}:
        found = _match_values(left, ("100", "\\cdot", "(", *right, ")"))
        return found if found.same else _match_values(left, right)
    # `90^\\circ` is `\\pi/2`: a gold with pi and without a unit is in radians.
    if (unit, other) == ("", "degree") and "\\pi" in left:
        right = ("(", *right, ")", "\\cdot", "\\pi", "/", "180")
    return match(left, right) if (unit or other) and form_of(left).kind != "scalar" else _match_values(left, right)


def _match_values(left: Tokens, right: Tokens) -> Match:
    try:
        a, b = value_of(left), value_of(right)
    except Unreadable as error:
        return Match(False, f"cannot be compared: {error}")
    if a.exact is not None and b.exact is not None:
        if a.exact == b.exact:
            return Match(True, "exact number")
    elif same_value(a, b):
        return Match(True, "value")
    if _WRITTEN_EXACTLY & {*right} and left[:-1] in ((), ("-",)) and "." in left[-1] and is_number(left[-1]):
        # Most golds of three or more digits are rounded.
        digits = left[-1].partition("e")[0].replace(".", "").lstrip("0")
        if len(digits) >= _ROUNDED_DIGITS and rounds_to(b, left):
            return Match(True, "rounds to the gold")
    return Match(False, "value")


def _match_ratios(left: Form, right: Form) -> Match:
    """Compare ratios by their quotients. A ratio of integers with a common divisor may be a time of day."""
    if not (_is_lowest(left) and _is_lowest(right)) and left.kind == right.kind:
        return _DIFFERENT if len(left.parts) != len(right.parts) else _match_parts(left, right)
    sides = [form.parts if form.kind == "ratio" else (form.tokens, ("1",)) for form in (left, right)]
    if len(sides[0]) != len(sides[1]) or "list" in (left.kind, right.kind):
        return _DIFFERENT
    first, second = sides
    same = all(
        _match_scalars(_quotient(first[0], one), _quotient(second[0], other)).same
        for one, other in zip(first[1:], second[1:], strict=True)
    )
    return Match(same, "ratio")


def _quotient(top: Tokens, bottom: Tokens) -> Tokens:
    return top if bottom == ("1",) else ("\\frac", "{", *top, "}", "{", *bottom, "}")


def _is_lowest(form: Form) -> bool:
    numbers = [int(part[0]) for part in form.parts if len(part) == 1 and part[0].isdecimal() and len(part[0]) < 10]
    return form.kind != "ratio" or len(numbers) < len(form.parts) or math.gcd(*numbers) == 1


def _match_parts(left: Form, right: Form) -> Match:
    """Compare lists, sets, unions, tuples and matrices part by part."""
    left, right = _named(left, right), _named(right, left)
    alike = left.kind == right.kind and left.signs == right.signs
    alike = alike or (left.kind in _UNORDERED and right.kind in _UNORDERED) or (_is_vector(left) and _is_vector(right))
    if not alike:
        union, other = (left, right) if left.kind == "union" else (right, left)
        found = union_of(other.parts) if union.kind == "union" and other.kind == "list" else None
        if found is None:
            return _DIFFERENT
        left, right = (left, found) if union is left else (found, right)
    parts = right.parts
    if left.kind in _UNORDERED and len(parts) > len(left.parts) > 1 and len({*left.parts}) == len(left.parts):
        parts = tuple(dict.fromkeys(parts))  # A repeated solution counts once.
    if len(left.parts) != len(parts):
        return _DIFFERENT
    if (left.kind in _UNORDERED or left.kind == "union") and not _names_order(left, right):
        same = _same_in_any_order(left.parts, parts)
    else:
        same = all(match(*pair).same for pair in zip(left.parts, parts, strict=True))
    return Match(same, f"parts of a {left.kind}")


def _is_vector(form: Form) -> bool:
    r"""Return True for the spellings of a vector: `(1, 2)`, `\langle 1, 2 \rangle`, `[1, 2, 3]`, a column."""
    if form.kind == "matrix":
        return len(form.signs) > 1 and set(form.signs) == {"1"}
    square = form.signs == ("[", "]") and len(form.parts) > 2
    return form.kind == "tuple" and (square or form.signs in (("(", ")"), ("\\langle", "\\rangle")))


def _named(form: Form, other: Form) -> Form:
    """Return a list such as `x = 5, y = 2` as tuples `(5, 2)` if the other side consists of tuples."""
    if form.kind != "list":
        return form
    found = [assignment(part) for part in map(form_of, form.parts) if part.kind == "relation"]
    names = [one[0] for one in found if one and one[0]]
    num_names = len({*names})
    if len(names) < len(form.parts) or num_names < 2 or names != names[:num_names] * (len(names) // num_names):
        return form
    values = [one[1] for one in found if one]
    groups = [values[start : start + num_names] for start in range(0, len(values), num_names)]
    tuples = tuple(("(", *[token for value in group for token in (",", *value)][1:], ")") for group in groups)
    if other.kind == "tuple" and len(tuples) == 1:
        return form_of(tuples[0])
    are_points = bool(other.parts) and other.parts[0][:1] == ("(",)
    return Form("list", form.tokens, (), tuples) if len(tuples) > 1 and are_points else form


def _names_order(gold: Form, answer: Form) -> bool:
    """Return True if the gold names its values by different letters, and the answer gives only values."""
    if gold.kind != "list" or any(form_of(part).kind == "relation" for part in answer.parts):
        return False
    found = [assignment(part) for part in map(form_of, gold.parts) if part.kind == "relation"]
    letters = {one[0][:1] for one in found if one and one[0]}
    return len(letters) == len(gold.parts) > 1


def _same_in_any_order(gold: tuple[Tokens, ...], answer: tuple[Tokens, ...]) -> bool:
    rest = list(answer)
    for part in gold:
        found = next((other for other in rest if match(part, other).same), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _match_relations(left: Form, right: Form) -> Match:
    """Compare a relation with a relation, a value (`x = 5` with `5`) or an interval."""
    if left.kind == right.kind:
        return _match_two_relations(left, right)
    relation, other = (left, right) if left.kind == "relation" else (right, left)
    if other.kind in ("tuple", "union", "words"):
        # (1, 2) is an interval and not a point if the gold is a relation, or has other brackets or an infinite end.
        is_interval = relation is left or any(sign in other.tokens for sign in ("[", "]", "\\infty"))
        written = interval(relation) if is_interval else None
        if written is not None:
            return match(written, other.tokens) if relation is left else match(other.tokens, written)
    if relation is left:
        values = gold_values(relation)
    else:
        one = assignment(relation)
        values = (one[1],) if one else ()
        if one and left.kind == "list" and is_variable(one[0]) and one[0][0] == "(":
            left = Form("tuple", left.tokens, ("(", ")"), left.parts)  # `(x, y) = (1, 2)` for `1, 2`
            return _match_parts(left, form_of(one[1]))
    for value in values:
        found = match(value, right.tokens) if relation is left else match(left.tokens, value)
        if found.same:
            return found
    return _DIFFERENT


def gold_values(relation: Form) -> tuple[Tokens, ...]:
    r"""Return the values that the gold `x = \frac13 \approx 0.33` gives its unknown: `\frac13` and `0.33`."""
    if not {*relation.signs} <= {"=", "\\approx"}:
        return ()
    if "\\approx" not in relation.signs:
        found = assignment(relation)
        # `\\log_2 32 = 5` gives a value, though it has no unknown.
        return (found[1],) if found and (found[0] or _is_constant(found[1])) else ()
    return tuple(part for part in relation.parts if not is_name(part))


def assignment(relation: Form) -> tuple[Tokens, Tokens] | None:
    """Return the unknown (() in `2 + 3 = 5`) and its value in `x = 5`, `5 = x`, `x = y = 5` or `x = 2 + 3 = 5`.

    Returns None for any other relation, for sides that disagree, and for an approximation that is not a rounding.
    """
    if not {*relation.signs} <= {"=", "\\approx"}:
        return None
    sides = relation.parts if is_name(relation.parts[0]) else relation.parts[::-1]
    if not is_name(sides[0]) or "\\approx" in relation.signs:
        sides = relation.parts
    num_names = next((place for place, side in enumerate(sides) if not is_name(side)), len(sides) - 1)
    unknown = tuple(token for side in sides[:num_names] for token in ("=", *side))[1:]
    values = sides[num_names:]
    if "\\approx" in relation.signs:
        rounded = relation.signs.index("\\approx") + 1
        exact = values[: max(1, rounded - num_names)]
        if not all(_is_rounding(exact[-1], value) for value in values[len(exact) :]):
            return None
        values = exact
    if not all(match(values[0], value).same for value in values[1:]):
        return None
    return unknown, values[-1]


def _is_rounding(exact: Tokens, decimal: Tokens) -> bool:
    """Return True if an expression rounds to a decimal, with or without a unit."""
    number = split_unit(decimal)[0]
    if not number or not is_number(number[-1]) or number[:-1] not in ((), ("-",)):
        return False
    try:
        return rounds_to(value_of(split_unit(exact)[0]), number)
    except Unreadable:
        return False


def _match_two_relations(left: Form, right: Form) -> Match:
    if "\\approx" in left.signs:
        answer = assignment(right)
        names = [part for part in left.parts if is_name(part)]
        if answer is None or (names and answer[0] not in ((), *names)):
            return _DIFFERENT
        same = any(match(value, answer[1]).same for value in gold_values(left))
        return Match(same, "either side of an approximation")
    if (
        {*left.signs, *right.signs} == {"="}
        and "(" not in left.tokens
        and all(map(is_name, (*left.parts, *right.parts)))
    ):
        return Match(sorted(left.parts) == sorted(right.parts), "names that are equal")
    gold, answer = assignment(left), assignment(right)
    if gold and answer and gold[0] and answer[0]:
        value = _renamed(gold[0], answer[0], answer[1])
        same = value is not None and bool(match(gold[1], value).same)
        if same or _is_constant(gold[1]):
            return Match(same, "assignment")
    elif gold and gold[0] and _is_constant(gold[1]):
        return Match(False, "an equation, but not solved")
    same = any(
        signs == left.signs and all(match(*pair).same for pair in zip(left.parts, parts, strict=True))
        for signs, parts in (
            (right.signs, right.parts),
            (tuple(_FLIPPED[sign] for sign in reversed(right.signs)), right.parts[::-1]),
        )
    )
    return Match(True, "sides of a relation") if same else _match_multiples(left, right)


def _renamed(gold: Tokens, answer: Tokens, value: Tokens) -> Tokens | None:
    """Return the answer's value in the gold's letters, since `f(x) = x` means `f(z) = z`; None for other names."""
    if gold == answer or _in_italics(gold) == _in_italics(answer):
        return value
    function = gold[1:2] == ("(",) and len(gold) == len(answer) == 4 and gold[:2] == answer[:2]
    if not function or not is_symbol(gold[2]) or not is_symbol(answer[2]) or gold[2] in value:
        return None
    return tuple(gold[2] if token == answer[2] else token for token in value)


def _in_italics(tokens: Tokens) -> Tokens:
    r"""Write single letters in text as variables: `\mathrm{r}` as r."""
    return tuple(token[1:] if token[0] == WORDS and len(token) == 2 else token for token in tokens)


def _is_constant(tokens: Tokens) -> bool:
    """Return True for a value without variables: its assignment is a solution, other equations are not."""
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


# Inequalities as intervals, several of them as a union ---------------------------------------------------------------


def interval(relation: Form) -> Tokens | None:
    r"""Return `1 < x \leq 2` as `(1, 2]`, `x > 3` as `(3, \infty)`, `x \neq 3` as a union; None for anything else."""
    signs, parts = relation.signs, relation.parts
    if signs == ("\\neq",) and is_name(parts[0]):
        edge = parts[1]
        return ("(", "-", "\\infty", ",", *edge, ")", "\\cup", "(", *edge, ",", "\\infty", ")")
    if signs[0] in (">", "\\geq"):
        signs, parts = tuple(_FLIPPED[sign] for sign in reversed(signs)), parts[::-1]
    if not set(signs) <= {"<", "\\leq"}:
        return None
    if len(parts) == 2:
        infinite = ("-", "\\infty") if is_name(parts[0]) else ("\\infty",)
        parts = (infinite, *parts) if is_name(parts[0]) else (*parts, infinite)
        signs = ("<", *signs) if len(infinite) == 2 else (*signs, "<")
    if len(parts) != 3 or not is_name(parts[1]):
        return None
    opening, closing = "[" if signs[0] == "\\leq" else "(", "]" if signs[1] == "\\leq" else ")"
    return (opening, *parts[0], ",", *parts[2], closing)


def union_of(parts: Sequence[Tokens]) -> Form | None:
    r"""Return `x < 1, x = 3, x > 5` as a union; None if a part has another form, or if two parts overlap.

    Overlapping parts are meant to be joined by "and", so they mean their intersection.
    """
    pieces = []
    for part in parts:
        relation = form_of(part)
        if relation.kind != "relation":
            return None
        is_point = relation.signs == ("=",) and is_name(relation.parts[0])
        piece = ("\\{", *relation.parts[1], "\\}") if is_point else interval(relation)
        if piece is None:
            return None
        pieces.append(piece)
    infinite = {("\\infty",): math.inf, ("-", "\\infty"): -math.inf}
    try:
        ends = [[infinite.get(end) or real_value(end) for end in form_of(piece).parts] for piece in pieces]
    except Unreadable:
        return None
    if any(before[1] > after[0] for before, after in pairwise(sorted((end[0], end[-1]) for end in ends))):
        return None
    return Form("union", (), (), tuple(pieces))

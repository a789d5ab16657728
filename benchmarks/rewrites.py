r"""Harmless rewrites of an answer: other texts that mean the same, and that a rule which compares values must pay.

`restated` changes what a comparison has to understand: the order of a sum, a fraction as a decimal, the sides of a
relation. A gold of which no such rewrite is paid can be met by its own text alone, whatever a model finds out.
`respelled` changes only what reading undoes, such as spaces and `\dfrac`. Neither leaves work undone that the answer
had done: a number stays a number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from trl_ext.rewards.mathematics.form import Form, form_of, is_variable
from trl_ext.rewards.mathematics.tokens import (
    WORDS,
    Tokens,
    TooComplex,
    Unreadable,
    closes_at,
    is_number,
    is_symbol,
    split,
    tokenize,
)
from trl_ext.rewards.mathematics.units import split_unit

_MOST_PARTS = 4  # of a list, tuple or matrix that are rewritten, each by itself
_MOST_PLACES = 4  # decimals of a fraction that is written as one
_SIGNS = frozenset({"+", "-"})
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}
_COMMA = frozenset({","})
_APPROX = frozenset({"\\approx"})
_ASCII = {">": "\\geq", "<": "\\leq", "!": "\\neq"}
_NAME = re.compile(r"(?:[A-Z]|[|{}:]|\\(?:frac|angle|triangle|overline)|_ \{ \d+ \}| )+")
_COMMAS = re.compile(r"(?<![\d,.])(\d+)(\d{3})(?![\d,.])")
_LETTER = re.compile(r"\(?([A-J])\)?")


def latex(tokens: Tokens) -> str:
    """Return LaTeX that tokenizes to these tokens."""
    return " ".join(f"\\text{{{token[1:]}}}" if token.startswith(WORDS) else token for token in tokens)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Another text for an answer.

    Args:
        place: The part of the answer that was rewritten, such as "part 2". Of the rewrites of one place at least one
            must be paid, or that place can be met by its own text alone.
        how: What was done, such as "order of terms".
        text: The answer, rewritten.
    """

    place: str
    how: str
    text: str


def restated(answer: str) -> tuple[Rewrite, ...]:
    r"""Return other texts of an answer, which only a comparison of values finds equal; () where it knows none.

    Example:
        >>> [rewrite.text for rewrite in restated("x + 2")]
        ['2+x']
    """
    letter = _LETTER.fullmatch(answer.strip())
    if letter:
        return (Rewrite("whole", "brackets", letter[1] if answer.strip() != letter[1] else f"({letter[1]})"),)
    try:
        tokens = tokenize(answer)
        found = [Rewrite(place or "whole", how, _written(changed)) for place, how, changed in _of(_one_sign(tokens))]
    except (Unreadable, TooComplex):
        return ()
    if answer.count("$") == 2 and not answer.strip(" .").endswith("$"):
        found.append(Rewrite("formula", "without its signs", answer.replace("$", "")))
    return tuple(rewrite for rewrite in dict.fromkeys(found) if _differs(rewrite.text, tokens))


def respelled(answer: str) -> tuple[Rewrite, ...]:
    """Return spellings of an answer that reading takes for the same text."""
    found = {
        "formula": answer if "$" in answer else f"${answer}$",
        "spaces": f" {answer} ",
        "full stop": f"{answer}.",
        "large fraction": answer.replace("\\frac", "\\dfrac"),
        "small fraction": answer.replace("\\frac", "\\tfrac"),
        "sized brackets": answer.replace("(", "\\left(").replace(")", "\\right)")
        if "\\left" not in answer
        else answer,
        "thousands": _COMMAS.sub(r"\1,\2", answer) if answer.strip().isdigit() else answer,
    }
    return tuple(Rewrite("spelling", how, text) for how, text in found.items() if text != answer)


def _differs(text: str, tokens: Tokens) -> bool:
    try:
        return tokenize(text) != tokens
    except (Unreadable, TooComplex):
        return False


def _written(tokens: Tokens) -> str:
    """Return the tokens as people write them, where that gives the same tokens again."""
    text, before = "", ""
    for token in tokens:
        word = f"\\text{{{token[1:]}}}" if token.startswith(WORDS) else token
        is_joined = (before[-1:].isalnum() and word[0].isalnum()) and not (before.isdigit() and word.isalpha())
        text += f" {word}" if is_joined or before in (",", "&", "\\\\") else word
        before = word
    try:
        return text if tokenize(text) == tokens else latex(tokens)
    except (Unreadable, TooComplex):
        return latex(tokens)


def _one_sign(tokens: Tokens) -> Tokens:
    """Write `>=`, `<=` and `!=` as the one sign that they are."""
    found: list[str] = []
    for token in tokens:
        if token == "=" and found[-1:] and found[-1] in _ASCII:
            found[-1] = _ASCII[found[-1]]
        else:
            found.append(token)
    return tuple(found)


Found = Iterator[tuple[str, str, Tokens]]  # place, how, tokens


def _of(tokens: Tokens) -> Found:
    sides = [part for _, part in split(tokens, _APPROX)]
    if len(sides) == 2 and all(sides):
        yield from (("", "one side of an approximation", side) for side in sides)
        return
    if len(tokens) > 2 and set(tokens[1::2]) == {":"} and all(number.isdigit() for number in tokens[::2]):
        if len(tokens) == 3 and tokens[2] != "1":
            yield "", "ratio as a fraction", ("\\frac", "{", tokens[0], "}", "{", tokens[2], "}")
        else:
            yield "", "decimal in a ratio", (f"{tokens[0]}.0", *tokens[1:])
        return
    form = form_of(tokens)
    if form.tokens == ("\\infty",):
        yield "", "sign", ("+", "\\infty")
    elif form.kind == "numeral":
        digits, base = form.tokens[:-4], form.tokens[-4:]
        yield "", "brackets", (*digits[1:-1], *base) if digits[0] == "(" else ("(", *digits, ")", *base)
    elif form.kind == "relation":
        yield from _relation(form)
    elif form.kind == "scalar":
        yield from (("", how, changed) for how, changed in _scalar(form.tokens))
    elif form.parts and "\\pm" in form.tokens and form.kind == "list" and "," not in form.tokens:
        yield "", "both signs written out", (*form.parts[0], ",", *form.parts[1])
    elif form.parts:
        values = [_named_value(form_of(part)) for part in form.parts]
        if form.kind == "list" and all(values):
            alone = [token for value in values for token in (",", *(value or ()))]
            yield "values", "values alone", tuple(alone[1:])
        yield from _parts(form)


def _relation(form: Form) -> Found:
    left, right = form.parts[0], form.parts[-1]
    signs, parts = tuple(_FLIPPED.get(sign, sign) for sign in reversed(form.signs)), form.parts[::-1]
    turned = list(parts[0])
    for sign, part in zip(signs, parts[1:], strict=True):
        turned += [sign, *part]
    yield "", "sides", tuple(turned)
    if len(left) == 1 and left[0].startswith(WORDS) and is_variable(left):
        yield "name", "letter in italics", (left[0][1:], *form.tokens[1:])
    value = _named_value(form)
    if value is not None:
        yield "value", "value alone", value
    interval = _interval(form)
    if interval is not None:
        yield "interval", "relation as an interval", interval
    if len(form.parts) == 2 and not is_variable(right):
        for place, how, changed in _first_of_each(right):
            yield f"right side{place}", how, (*left, form.signs[0], *changed)


def _named_value(form: Form) -> Tokens | None:
    """Return 5 of `x = 5`, `|AB| = 5` or `2 + 3 = 5`; None for anything else."""
    if form.signs != ("=",) or form.kind != "relation" or any(map(_is_unknown, form.parts[1])):
        return None
    name = form.parts[0]
    is_name = is_variable(name) or _NAME.fullmatch(" ".join(name)) or not any(map(_is_unknown, name))
    return form.parts[1] if is_name else None


def _interval(form: Form) -> Tokens | None:
    """Return (1, 2] of `1 < x \\leq 2` and [5, oo) of `x \\geq 5`; None for anything but numbers around an unknown."""
    signs, parts = form.signs, form.parts
    if signs[0] in (">", "\\geq"):
        signs, parts = tuple(_FLIPPED.get(sign, sign) for sign in reversed(signs)), parts[::-1]
    if not set(signs) <= {"<", "\\leq"} or len(parts) > 3:
        return None
    if len(parts) == 2:
        is_below = is_variable(parts[0])
        parts = (("-", "\\infty"), *parts) if is_below else (*parts, ("\\infty",))
        signs = ("<", *signs) if is_below else (*signs, "<")
    low, middle, high = parts
    if not is_variable(middle) or any(map(_is_unknown, (*low, *high))):
        return None
    opening, closing = "[" if signs[0] == "\\leq" else "(", "]" if signs[1] == "\\leq" else ")"
    return (opening, *low, ",", *high, closing)


def _parts(form: Form) -> Found:
    """Rewrite one part after the other, where each stands."""
    tokens = form.tokens
    places: list[tuple[int, int]] = []
    start = 0
    for part in _written_parts(form):
        begin = _find(tokens, part, start)
        if begin < 0:
            return
        places.append((begin, begin + len(part)))
        start = begin + len(part)
    for number, (begin, end) in enumerate(places[:_MOST_PARTS], 1):
        for place, how, changed in _of(tokens[begin:end]):
            if place in ("value", "interval", "name"):
                continue  # one part without its name would stand beside others with theirs
            inner = f", {place}" if place else ""
            yield f"part {number}{inner}", how, (*tokens[:begin], *changed, *tokens[end:])


def _written_parts(form: Form) -> list[Tokens]:
    r"""Return the parts as they are written, where `\{1 \pm 2, 3\}` has two and three values."""
    if "\\pm" not in form.tokens:
        return list(form.parts)
    inner = form.tokens[1:-1] if closes_at(form.tokens, 0) == len(form.tokens) - 1 else form.tokens
    return [part for _, part in split(inner, _COMMA)]


def _first_of_each(tokens: Tokens) -> Found:
    for place, how, changed in _of(tokens):
        yield (f", {place}" if place else ""), how, changed


def _find(tokens: Tokens, part: Tokens, start: int) -> int:
    width = len(part)
    return next((at for at in range(start, len(tokens) - width + 1) if tokens[at : at + width] == part), -1)


def _scalar(tokens: Tokens) -> Iterator[tuple[str, Tokens]]:
    """Rewrite one expression, with or without a unit."""
    value, unit = split_unit(tokens)
    if unit:
        begin = _find(tokens, value, 0)
        if begin >= 0:
            for how, changed in _scalar(value):
                yield how, (*tokens[:begin], *changed, *tokens[begin + len(value) :])
        else:  # The value does not stand in the answer as it is, such as that of 63° 45'.
            at = max((at for at, token in enumerate(tokens) if token.isdigit()), default=0)
            yield "decimal", (*tokens[:at], f"{tokens[at]}.0", *tokens[at + 1 :])
        return
    found = list(_expressions(tokens))
    yield from found or [("brackets", ("(", *tokens, ")"))]


def _expressions(tokens: Tokens) -> Iterator[tuple[str, Tokens]]:
    sign, rest = (tokens[:1], tokens[1:]) if tokens[:1] == ("-",) else ((), tokens)
    if len(rest) == 1 and _is_decimal(rest[0]):
        whole = rest[0] if "." in rest[0] else f"{rest[0]}."
        yield "decimal", (*sign, f"{whole}0")
        return
    fraction = _fraction(rest)
    if fraction is not None:
        top, bottom = fraction
        exact = (
            Fraction(top) / Fraction(bottom) if _is_decimal(top) and _is_decimal(bottom) and float(bottom) else None
        )
        if exact is not None and 10**_MOST_PLACES % exact.denominator == 0:
            yield "decimal", (*sign, _decimal(exact))
        yield (
            ("slash", (*sign, top, "/", bottom))
            if rest[0] == "\\frac"
            else (
                "fraction",
                (*sign, "\\frac", "{", top, "}", "{", bottom, "}"),
            )
        )
        return
    terms = _terms(tokens)
    if len(terms) > 1:
        swapped = [*terms[1:], terms[0]]
        joined = tuple(token for term in swapped for token in term)
        yield "order of terms", joined[1:] if joined[0] == "+" else joined
    if rest[:1] == ("(",) and len(terms) == 1:
        end = closes_at(rest, 0)
        if rest[end + 1 : end + 2] == ("(",) and closes_at(rest, end + 1) == len(rest) - 1:
            yield "order of factors", (*sign, *rest[end + 1 :], *rest[: end + 1])
    if rest[:1] == ("\\frac",):
        middle = closes_at(rest, 1)
        end = closes_at(rest, middle + 1)
        if end == len(rest) - 1:
            yield "slash", (*sign, "(", *rest[2:middle], ")", "/", "(", *rest[middle + 2 : end], ")")
    if "\\sqrt" in tokens:
        yield from _root_as_power(tokens)
    for place in range(len(tokens) - 1):
        if is_number(tokens[place]) and (is_symbol(tokens[place + 1]) or tokens[place + 1] == "\\sqrt"):
            yield "sign of a product", (*tokens[: place + 1], "\\cdot", *tokens[place + 1 :])
            break


def _root_as_power(tokens: Tokens) -> Iterator[tuple[str, Tokens]]:
    at = tokens.index("\\sqrt")
    if tokens[at + 1 : at + 2] == ("{",):
        end = closes_at(tokens, at + 1)
        inside = tokens[at + 2 : end]
        power = ("(", *inside, ")", "^", "{", "1", "/", "2", "}")
        if at and tokens[at - 1].startswith("\\"):  # `\\sin (2)^{1/2}` has two readings.
            power = ("(", *power, ")")
        yield "root as a power", (*tokens[:at], *power, *tokens[end + 1 :])


def _fraction(tokens: Tokens) -> tuple[str, str] | None:
    r"""Return numerator and denominator of `\frac{3}{4}` or `3/4`; None for anything else."""
    if len(tokens) == 7 and tokens[0] == "\\frac" and is_number(tokens[2]) and is_number(tokens[5]):
        return tokens[2], tokens[5]
    if len(tokens) == 3 and tokens[1] == "/" and is_number(tokens[0]) and is_number(tokens[2]):
        return tokens[0], tokens[2]
    return None


def _terms(tokens: Tokens) -> list[Tokens]:
    """Return the terms of a sum, each with its sign; one where a sign is no operator between two terms."""
    terms: list[Tokens] = []
    for mark, part in split(tokens, _SIGNS):
        if part:
            terms.append((mark or "+", *part))
        elif mark:  # two signs in a row
            return [tokens]
    return terms if len(terms) > 1 else [tokens]


def _decimal(number: Fraction) -> str:
    scaled = number * 10**_MOST_PLACES
    text = f"{int(scaled) // 10**_MOST_PLACES}.{int(scaled) % 10**_MOST_PLACES:0{_MOST_PLACES}d}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def _is_decimal(token: str) -> bool:
    return re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", token) is not None


def _is_unknown(token: str) -> bool:
    return (is_symbol(token) and token not in ("e", "i", "\\pi")) or token.startswith(WORDS)

r"""Split the unit from an answer: `5\text{ cm}^2`, `$18`, `90^\circ`, `50\%`, `18 apples`.

Units are compared, not converted: if both answers have a unit, it must be the same, so `5 cm` is neither `5 m` nor
`0.05 m`. If either has none, only the numbers are compared. Percent is such a unit: `50\%` is 50, never 0.5. Words
that count (`3 million`) become factors. Words that make a statement (`5 \text{ is wrong}`) are no unit: the answer is
compared with them.
"""

import re

from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, text_of
from trl_ext.rewards.text.number_words import FACTORS

_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "\\pounds": "pound", "\\euro": "euro"}
_SIGNS = {"\\degree": "degree", "%": "percent", "\\min": "minute", "\\sec": "second", **_CURRENCIES}
_SAME = {
    "deg": "degree", "pct": "percent", "percentage": "percent", "usd": "dollar", "buck": "dollar",
    "centimeter": "cm", "centimetre": "cm",
    "millimeter": "mm", "millimetre": "mm", "kilometer": "km", "kilometre": "km", "meter": "m", "metre": "m",
    "inche": "inch", "in": "inch", "feet": "foot", "ft": "foot", "yd": "yard", "mi": "mile", "lb": "pound",
    "kilogram": "kg", "gram": "g", "milligram": "mg", "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml",
    "millilitre": "ml", "hr": "hour", "h": "hour", "min": "minute", "sec": "second", "s": "second", "mph": "mile/hour",
    "kph": "km/hour", "kmh": "km/hour", "radian": "rad", "square": "sq", "cubic": "cu", "men": "man", "women": "woman",
    "people": "person", "children": "child", "am": "morning", "pm": "afternoon", "per": "/",
}  # fmt: skip
_ANGLE_FUNCTIONS = frozenset({"\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"})
# Words that state, negate, join or scale: a text with such a word is a sentence.
_NO_UNIT = frozenset(
    "not no or and is isn are was be wrong right but maybe either neither nor if else approx approximately about plus"
    " minus times over only then so because hence thus since where when never incorrect correct false true option all"
    " the these those any none other both more less than least most up to from through between base half quarter third"
    " twice double doubled halved tripled factorial raised choose root sqrt sin cos tan log ln exp mod".split()
)
_MAX_WORDS = 5
_ANGLE = re.compile(r"(?:- )?\S+ \\degree \S+ '")  # degrees, minutes
_SIGN = "|".join(map(re.escape, _SIGNS))
_TAIL = re.compile(rf"(?: (?:\"\S*(?: \^ \{{ [23] \}})?(?: (?:/|\\cdot|-))*|\\degree [CF]|{_SIGN})(?= |\Z))+\Z")
_WORD = re.compile(r"[^\W\d_]{2,}|[mgshlLAVWJNKCF]")  # single letters only where written as text
_PLURAL = re.compile(r"(?<=...)(?<!s)s\Z")
_SHAPES = tuple(
    (re.compile(pattern), shape)
    for pattern, shape in (
        (r" \^ ([23])", r"^\1"),
        (r" squared", "^2"),
        (r" cubed", "^3"),
        (r"^sq (\S+)", r"\1^2"),
        (r"^cu (\S+)", r"\1^3"),
        (r" ?/ ?", "/"),
    )
)


def split_unit(tokens: Tokens) -> tuple[Tokens, str]:
    """Return an answer without its unit, and the unit in its standard spelling ("" if there is none)."""
    bare, currency = _without_currency(_in_degrees(tokens))
    text = text_of(bare)
    found = _TAIL.search(text)
    if not found:
        return (bare, currency) if bare else (tokens, "")
    place = text.count(" ", 0, found.start()) + 1
    value, tail = bare[:place], bare[place:]
    if tail[0] == "\\degree" and value[-1] != ")" and _ANGLE_FUNCTIONS & {*value}:
        return tokens, ""  # `\\sin 30^\\circ`
    first, _, rest = tail[0].removeprefix(WORDS).partition(" ")
    if first in FACTORS:  # The first word may be a factor, such as "million".
        value = ("(", *value, ")", "\\cdot", str(FACTORS[first]))
        tail = (WORDS + rest, *tail[1:]) if rest else tail[1:]
    unit = _unit(tail)
    if unit is None:
        return tokens, ""
    return value, currency or unit


def agree(unit: str, other: str) -> bool:
    """Return True if two units may be the same: `duck egg` and `egg`, or either is "", but not `cm` and `cm^2`."""
    if not unit or not other or unit == other:
        return True
    plain = not set(unit + other) & set("/^")
    return plain and unit.split()[-1] == other.split()[-1]


def _without_currency(tokens: Tokens) -> tuple[Tokens, str]:
    """Return an amount without the sign of its currency, in front or after the minus."""
    place = int(tokens[:1] == ("-",))
    currency = _CURRENCIES.get("".join(tokens[place : place + 1]), "")
    return (tokens[:place] + tokens[place + 1 :], currency) if currency else (tokens, "")


def _in_degrees(tokens: Tokens) -> Tokens:
    r"""Write an angle with minutes, `63^\circ 45'`, in degrees only."""
    if "\\degree" not in tokens or not _ANGLE.fullmatch(text_of(tokens)):
        return tokens
    sign = tokens[: tokens.index("\\degree") - 1]
    degrees, _, minutes, _ = tokens[len(sign) :]
    return (*sign, "(", degrees, "+", minutes, "/", "60", ")", "\\degree")


def _unit(tail: Tokens) -> str | None:
    """Return the standard spelling of a unit; None if the words are a sentence."""
    text = " ".join(token.removeprefix(WORDS) for token in tail)
    parts = re.findall(r"[^\s.{}-]+", text.replace("/", " per "))
    words = [part for part in parts if part not in _SIGNS and part not in ("^", "2", "3", "\\cdot")]
    if len(words) > _MAX_WORDS or any(word in _NO_UNIT or not _WORD.fullmatch(word) for word in words):
        return None
    if parts[:1] in (["squared"], ["cubed"]):  # `7 cubed` is a power and no unit.
        return None
    unit = " ".join(_SIGNS.get(part) or _singular(part) for part in parts)
    for pattern, shape in _SHAPES:
        unit = pattern.sub(shape, unit)
    return unit


def _singular(word: str) -> str:
    singular = word if word in _SAME else _PLURAL.sub("", word)
    return _SAME.get(singular, singular)

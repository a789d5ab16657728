r"""Split the unit from an answer: `5\text{ cm}^2`, `$18`, `90^\circ`, `50\%`, `18 apples`.

Units are compared, not converted: if both answers have a unit, it must be the same, so `5 cm` is neither `5 m` nor
`0.05 m`. If either has none, only the numbers are compared. Percent is such a unit: `50\%` is 50, never 0.5. Words
that count (`3 million`) become factors. Words that make a statement (`5 \text{ is wrong}`) are no unit: the answer is
compared with them.
"""

import re

from trl_ext.rewards.mathematics.tokens import WORDS, Tokens
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
    "people": "person", "children": "child", "am": "morning", "pm": "afternoon",
}  # fmt: skip
_ANGLE_FUNCTIONS = frozenset({"\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"})
_LETTERS = frozenset("mgshlLAVWJNKCF")  # single letters that are units when written as text
# Words that state, negate, join or scale: a text with such a word is a sentence.
_NO_UNIT = frozenset(
    "not no or and is isn are was be wrong right but maybe either neither nor if else approx approximately about plus"
    " minus times over only then so because hence thus since where when never incorrect correct false true option all"
    " the these those any none other both more less than least most up to from through between base half quarter third"
    " twice double doubled halved tripled factorial raised choose root sqrt sin cos tan log ln exp mod".split()
)
_MAX_WORDS = 5


def split_unit(tokens: Tokens) -> tuple[Tokens, str]:
    """Return an answer without its unit, and the unit in its standard spelling ("" if there is none)."""
    bare, currency = _in_degrees(tokens), ""
    for position in (0, 1):  # `-\\$5` and `\\$-5` are -5.
        if position < len(bare) and bare[position] in _CURRENCIES and bare[:position] in ((), ("-",)):
            bare, currency = bare[:position] + bare[position + 1 :], _CURRENCIES[bare[position]]
            break
    start = len(bare)
    while start > 0 and (length := _unit_piece(bare[:start])):
        start -= length
    value, tail = bare[:start], bare[start:]
    if not value:
        return tokens, ""
    if tail[:1] == ("\\degree",) and value[-1] != ")" and _ANGLE_FUNCTIONS & {*value}:
        return tokens, ""  # `\\sin 30^\\circ`
    factor = 1
    if tail and tail[0].startswith(WORDS):  # The first word may be a factor, such as "million".
        first, _, rest = tail[0][1:].partition(" ")
        factor = FACTORS.get(first, 1)
        if factor != 1:
            tail = (WORDS + rest, *tail[1:]) if rest else tail[1:]
    unit = _unit(tail)
    if unit is None:
        return tokens, ""
    if factor != 1:
        value = ("(", *value, ")", "\\cdot", str(factor))
    if currency:
        return value, currency + (unit if unit.startswith("/") else "")
    return value, unit


def agree(unit: str, other: str) -> bool:
    """Return True if two units may be the same: `duck egg` and `egg`, or either is "", but not `cm` and `cm^2`."""
    if not unit or not other or unit == other:
        return True
    plain = not set(unit + other) & set("/^")
    return plain and unit.split()[-1] == other.split()[-1]


def _in_degrees(tokens: Tokens) -> Tokens:
    r"""Write an angle with minutes and seconds, `63^\circ 45'`, in degrees only."""
    if tokens[-1:] != ("'",) or "\\degree" not in tokens:
        return tokens
    sign, rest = (tokens[:1], tokens[1:]) if tokens[0] == "-" else ((), tokens)
    if len(rest) not in (4, 7) or rest[1] != "\\degree" or rest[3] != "'" or rest[5:] not in ((), ("'", "'")):
        return tokens
    seconds = ("+", rest[4], "/", "3600") if len(rest) == 7 else ()
    return (*sign, "(", rest[0], "+", rest[2], "/", "60", *seconds, ")", "\\degree")


def _unit_piece(tokens: Tokens) -> int:
    """Count the last tokens that are a word, a sign, an exponent of a word or a slash after a word; 0 if none are."""
    last = tokens[-1]
    if last in _SIGNS or last.startswith(WORDS):
        return 1
    if last in ("C", "F") and tokens[-2:-1] == ("\\degree",):
        return 1
    if last == "}" and tokens[-4:-2] == ("^", "{") and tokens[-2] in ("2", "3"):
        return 4 if tokens[-5:-4] and tokens[-5].startswith(WORDS) else 0
    behind_word = len(tokens) > 1 and tokens[-2].startswith(WORDS)
    return 1 if last in ("/", "\\cdot", "-") and behind_word else 0


def _unit(tail: Tokens) -> str | None:
    """Return the standard spelling of a unit; None if the words are a sentence."""
    parts: list[str] = []
    for token in tail:
        if not token.startswith(WORDS):
            parts.append(_SIGNS.get(token, token))
            continue
        words = re.findall(r"[^\s.-]+", token[1:].replace("/", " per "))
        if len(words) > _MAX_WORDS or not all(
            word.isalpha() and word not in _NO_UNIT and (len(word) > 1 or word in _LETTERS) for word in words
        ):
            return None
        for word in words:
            if word not in _SAME and len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
                word = word[:-1]
            parts.append("/" if word == "per" else _SAME.get(word, word))
    if parts[:1] in (["squared"], ["cubed"]):  # `7 cubed` is a power and no unit.
        return None
    # `sq cm`, `cm squared` and `cm ^ { 2 }` are `cm^2`.
    unit = " ".join(parts).replace(" ^ { 2 }", "^2").replace(" ^ { 3 }", "^3").replace(" / ", "/").replace("/ ", "/")
    unit = unit.replace(" squared", "^2").replace(" cubed", "^3")
    return re.sub(r"^(sq|cu) (\S+)", lambda match: f"{match[2]}^{2 if match[1] == 'sq' else 3}", unit)

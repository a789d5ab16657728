r"""Exact numbers, read from text.

Understood: thousands separators (`1,234`, `10{,}000`), decimals, exponents (`1.5e3`), fractions and mixed numbers
(`1 1/2`, `\frac{1}{2}`), signs, currency, percent, units in words, full-width digits. Compared exactly: 0.33 is not
1/3. Percent signs and units are dropped, not converted: `50%` is 50, and neither `0.5` nor `1/2`.

A number that is part of something larger is not taken for the whole: `3\sqrt{13}`, `2^10` and `3x` give no number, and
neither do an announced `5=3` and `3 or 5`. A rule that read 3 there would reward fragments.

Every pattern is linear: each repetition is possessive (`*+`), bounded, or disjoint from what follows it.
"""

import re
from fractions import Fraction

from trl_ext.rewards.anchors import Reading, anchored

MAX_DIGITS = 100  # Longer runs are a model that loops, and the cost of exact arithmetic grows with their square.

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = (
    rf"(?:(?P<whole>[0-9]+)\ (?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<plain>{_PLAIN}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)(?:/(?P<over>{_PLAIN}))?)"
)
_ALONE = re.compile(rf"(?P<sign>[-+]?)\s?{_NUMBER}(?P<rest>.*)", re.DOTALL)
_IN_TEXT = re.compile(rf"(?<![0-9A-Za-z_^.\\{{/])(?<![0-9][,:]){_NUMBER}")

_DIGIT = re.compile(r"(?<![A-Za-z0-9_.-])[0-9]|[\uff10-\uff19]|(?<![A-Za-z0-9_])[.-][0-9]")
# What may follow a number that stands alone: percent, a unit in words with an exponent, a full stop.
_UNIT = re.compile(r"\s*+[%°]?+(?:[^\W\d_]|[ /.'°-]|\^\{?[23]\}?)*+")
_VARIABLE = re.compile(r"[A-Za-z](?![A-Za-z])|\s*[π√∞]|[²³¹\u2070-\u207f]")
# What shows that a number in running text is a part of something larger.
_PART = re.compile(r"\s*[\^√π∞\\]|\s*[-+*\u00d7\u00f7\u00b7/]\s*[0-9(\\]|[,.:/][0-9]|[_{]|" + _VARIABLE.pattern)
_ANOTHER = re.compile(r"\s*(?:,|;|、|or\b|and\b|或|和)\s*[-+]?[0-9]")
_MATHS = re.compile(r"[\\^_{}\[\]()!|<>≤≥±√π∞]")

# Full-width ASCII, dashes as minus, currencies as dollar.
_TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TO_ASCII |= dict.fromkeys(map(ord, "\u2212\u2013\u2014"), ord("-"))
_TO_ASCII |= dict.fromkeys(map(ord, "\u20ac\u00a3\u00a5\uffe5"), ord("$"))
_FRACTION = re.compile(r"\\[dt]?frac\{\s?([0-9.,]+)\s?\}\{\s?([0-9.,]+)\s?\}|\\[dt]?frac([0-9])([0-9])")
_UNWRAP = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_DELIMITERS = re.compile(r"\\[()\[\] ;]|\\(?:left|right)(?![A-Za-z])")
_DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?")


def read_number(text: str) -> Reading:
    r"""The number that a completion gives as its answer.

    The announced one (see `anchors`), or without an anchor the last number of the text.

    Example:
        >>> read_number("16 - 3 = 13 eggs, so she earns $26.").value, read_number("A: 1,018 dollars").value
        (Fraction(26, 1), Fraction(1018, 1))
    """
    found = anchored(text, "number")
    if found is None:
        return _labelled(_last_in_text(text), "last number")
    if found.anchor in ("\\boxed", "<answer>"):
        return _labelled(_whole_content(found.content), f"'{found.anchor}'")
    return _labelled(_first_in_line(found.content), f"'{found.anchor}'")


def read_gold_number(text: str) -> Reading:
    """The number of a gold column: announced (`... #### 18`), or the whole text. Never a number found on the way."""
    if anchored(text, "number") is not None:
        return read_number(text)
    return _labelled(_alone(clean(text)), "whole text")


def clean(text: str) -> str:
    """LaTeX, full-width and currency spellings of a short text as plain characters; spaces trimmed."""
    if not text.isascii():
        text = text.translate(_TO_ASCII)
    if "\\" in text:
        text = _plain_latex(text)
    return text.replace("{,}", ",").replace("**", "").replace("-$", "-").replace("$", " ").strip()


def _plain_latex(text: str) -> str:
    for mark, plain in (("\\$", "$"), ("\\%", "%"), ("\\,", ""), ("\\!", "")):
        text = text.replace(mark, plain)
    text = _DEGREES.sub("°", _DELIMITERS.sub(" ", _UNWRAP.sub(r" \1 ", text)))
    return _FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
    mixed = match.string[match.start() - 1 : match.start()].isdigit()
    return f"{' ' if mixed else ''}{top}/{bottom}"


def _labelled(reading: Reading, anchor: str) -> Reading:
    return Reading(reading.value, reading.status, f"{anchor}: {reading.detail}")


def _no_answer(text: str) -> Reading:
    return Reading(None, "no_answer", f"no number in '{text[:60]}'" if text else "no number")


def _part_of(text: str) -> Reading:
    return Reading(None, "no_answer", f"'{text[:60]}' is more than a number")


def _conflict(text: str) -> Reading:
    return Reading(None, "conflict", f"several numbers in '{text[:60]}'")


def _read(match: re.Match[str], negative: bool) -> Reading:
    value = _value(match)
    shown = ("-" if negative else "") + match[0].strip()
    if value is None:
        return _part_of(shown)
    return Reading(-value if negative else value, "ok", shown)


def _value(match: re.Match[str]) -> Fraction | None:
    """The unsigned value of a `_NUMBER` match; None for more than MAX_DIGITS digits and for division by zero."""
    whole, top, bottom, plain, over = groups = match.group("whole", "top", "bottom", "plain", "over")
    if sum(len(group) for group in groups if group) > MAX_DIGITS:
        return None
    if plain and not over:
        return _fraction(plain)
    upper = _fraction(top or plain)
    lower = _fraction(bottom or over or "1")
    return None if lower == 0 else _fraction(whole or "0") + upper / lower


def _fraction(digits: str) -> Fraction:
    return Fraction(int(digits)) if digits.isdigit() else Fraction(digits.replace(",", ""))


def _alone(text: str) -> Reading:
    """A cleaned text that is one number and nothing else than its sign, percent and unit."""
    match = _ALONE.fullmatch(text)
    if match is None:
        return _no_answer(text)
    rest = match["rest"]
    if _VARIABLE.match(rest) or not _UNIT.fullmatch(rest):
        return _part_of(text)
    value = _value(match)
    if value is None:
        return _part_of(text)
    return Reading(-value if match["sign"] == "-" else value, "ok", text[:60])


def _whole_content(content: str) -> Reading:
    """A box or an answer tag: one number, or prose in which every number is the same."""
    text, contradiction = _right_side(clean(content))
    if contradiction:
        return _conflict(content)
    reading = _alone(text)
    if reading.value is not None or _MATHS.search(text):
        return reading
    readings = [_in_text(text, match) for match in _IN_TEXT.finditer(text)]
    failed = next((found for found in readings if found.value is None), None)
    if failed or not readings:
        return failed or _no_answer(text)
    return readings[0] if len({found.value for found in readings}) == 1 else _conflict(text)


def _first_in_line(line: str) -> Reading:
    """The number behind `####`, `A:` or a phrase: the first of the line, or the right side of its equation."""
    text, contradiction = _right_side(clean(line))
    if contradiction:
        return _conflict(line)
    # "- 3" with a space is a sign only directly behind the anchor; elsewhere it is a dash or a subtraction.
    text = re.sub(r"^([-+])\s(?=[0-9.])", r"\1", text)
    match = _IN_TEXT.search(text)
    if match is None:
        return _no_answer(text)
    reading = _in_text(text, match)
    return _conflict(text) if reading.value is not None and _ANOTHER.match(text, match.end()) else reading


def _last_in_text(text: str) -> Reading:
    """The last number of the last line that holds a digit (digits in names such as v2 aside)."""
    end = len(text)
    while end > 0:
        start = text.rfind("\n", 0, end) + 1
        if _DIGIT.search(text, start, end):
            line = clean(text[start:end])
            matches = list(_IN_TEXT.finditer(line))
            return _in_text(line, matches[-1]) if matches else _part_of(line)
        end = start - 1
    return _no_answer("")


def _in_text(text: str, match: re.Match[str]) -> Reading:
    if _PART.match(text, match.end()):
        return _part_of(text[match.start() : match.start() + 60])
    before = text[max(0, match.start() - 2) : match.start()]
    # A minus behind a letter, a digit or a bracket is a hyphen or a subtraction.
    negative = before.endswith("-") and not (before[:-1].isalnum() or before[:-1] in (")", "}", "%"))
    return _read(match, negative)


def _right_side(text: str) -> tuple[str, bool]:
    """The text behind the last "=" of an equation that opens the text, and whether both sides are different numbers.

    `x = 18` and `2 * 9 = 18` give `18`; `5 = 3` is a contradiction; prose before the "=" leaves the text as it is.
    """
    left, equals, right = text.rpartition("=")
    if not equals or re.search(r"[A-Za-z]{2}", left.replace("\\", "")):
        return text, False
    sides = {_alone(side.strip()).value for side in text.split("=")} - {None}
    return right.strip(), len(sides) > 1

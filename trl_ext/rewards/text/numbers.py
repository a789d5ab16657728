r"""Read exact numbers from text.

Understood are thousands separators (`1,234`, `10{,}000`), decimals, exponents (`1.5e3`), fractions and mixed numbers
(`1 1/2`, `\frac{1}{2}`), signs, currency, percent, units in words, full-width digits. Values are exact: 0.33 is not
1/3. Percent signs and units are dropped, not converted: `50%` is 50, and neither `0.5` nor `1/2`.

A number that is part of something larger is not taken for the whole: `3\sqrt{13}`, `2^10` and `3x` give no number, and
neither do an announced `5=3` and `3 or 5`. A rule that read 3 there would reward fragments.

An announced number stands alone: before it at most a currency, an `x =` or `2 * 9 =`, and a word such as "therefore";
behind it at most a unit in words. In free prose too many words turn a number into something else ("anything but 3").

Every pattern takes linear time: each repetition is possessive (`*+`), bounded, or disjoint from what follows it.
"""

import re
from fractions import Fraction

from trl_ext.rewards.text.anchors import DENIAL, AnswerReading, anchored, denied
from trl_ext.rewards.text.prose import HALF_WIDTH

MAX_DIGITS = 100  # A longer run is a model that loops, and the cost of exact arithmetic grows with its square.

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = (
    rf"(?:(?P<whole>[0-9]+)\ (?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<plain>{_PLAIN}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)(?:/(?P<over>{_PLAIN}))?)"
)
_ALONE = re.compile(rf"(?P<sign>[-+]?)\s?{_NUMBER}(?P<rest>.*)", re.DOTALL)
_IN_TEXT = re.compile(rf"(?<![0-9A-Za-z_^.\\{{/])(?<![0-9][,:]){_NUMBER}")

_DIGIT = re.compile(r"(?<![A-Za-z0-9_.-])[0-9]|[\uff10-\uff19]|(?<![A-Za-z0-9_])[.-][0-9]")
# May follow a number that stands alone: percent, a unit in words with an exponent, a full stop.
_UNIT = re.compile(r"\s*+[%°]?+(?>(?:[^\W\d_]|[ /.'°-]|\^\{?[23]\}?)*)")
_VARIABLE = re.compile(r"[A-Za-z](?![A-Za-z])|\s*[π√∞]|[²³¹\u2070-\u207f]")
# Behind a number in running text it shows that the number is a part of something larger.
_PART = re.compile(r"\s*[\^√π∞\\]|\s*[-+*\u00d7\u00f7\u00b7/]\s*[0-9(\\]|[,.:/][0-9]|[_{]|" + _VARIABLE.pattern)
_ANOTHER = re.compile(r"\s*(?:,|;|、|or\b|and\b|或|和)\s*[-+]?[0-9]")
# May stand before an announced number, once `clean` has removed LaTeX and currencies.
_BEFORE = re.compile(
    r"[\s*_`\"'\u201c\u2018:(\[]*+"
    r"(?:(?:therefore|thus|then|simply|just|exactly|approximately|about|equal\ to|a\ total\ of)[\s,:]++)?"
    r"(?:(?:USD?|EUR|GBP|CNY|RMB|INR|Rs\.?)\s*+(?=[-+0-9.]))?",
    re.IGNORECASE,
)
_CLOSING = " \t)]\"'\u201d\u2019*_`!,;:\u3002"
# The left side of an equation that gives a number: a variable, a name of one or two words, or arithmetic.
_LEFT = re.compile(
    r"[A-Za-z](?:_?\{?\w\}?)?|[A-Za-z]{3,40}(?:\ [A-Za-z]{3,40})?"
    r"|(?:[-+*/\u00d7\u00f7\u00b7().,0-9\s%]|\\(?:times|cdot|div)|(?<=[0-9)\s])x(?=\s?[0-9(]))*"
)
_MAX_SIDES = 20  # of an equation such as 2 * 3 * 7 = 6 * 7 = 42
_SENTENCE_END = re.compile(r"[!\n\u3002]|\.(?=\s|\Z)|\b(?:because|since|which)\b")
_CLAUSE_END = re.compile(r"[,;:(<\uff0c]")
_CHANGED = re.compile(rf"{DENIAL}|\b(?:plus|minus|squared|or|and a half)\b", re.IGNORECASE)
_MAX_UNIT_WORDS = 8  # "dollars every day at the farmers' market"

# Full-width characters become ASCII, dashes a minus, currencies a dollar.
_TO_ASCII = HALF_WIDTH | dict.fromkeys(map(ord, "\u2212\u2013\u2014"), ord("-"))
_TO_ASCII |= dict.fromkeys(map(ord, "\u20ac\u00a3\u00a5\uffe5"), ord("$"))
_FRACTION = re.compile(r"\\[dt]?frac\{\s?([0-9.,]+)\s?\}\{\s?([0-9.,]+)\s?\}|\\[dt]?frac([0-9])([0-9])")
_UNWRAP = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_DELIMITERS = re.compile(r"\\[()\[\] ;]|\\(?:left|right)(?![A-Za-z])")
CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's notes: <<48/2=24>>24
_DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?")


def read_number(text: str) -> AnswerReading:
    r"""Read the number that a completion gives as its answer.

    It is the announced number (see `anchors`), or without an announcement the last number of the text.

    Example:
        >>> read_number("16 - 3 = 13 eggs, so she earns $26.").value, read_number("A: 1,018 dollars").value
        (Fraction(26, 1), Fraction(1018, 1))
    """
    found = anchored(text, "number")
    if found is None:
        return _labelled(_last_in_text(text), "last number")
    if found.conflict:
        return found.conflict
    text, contradiction = _right_side(clean(found.content))
    if contradiction:
        return _labelled(_conflict(text), f"'{found.anchor}'")
    text = _BEFORE.sub("", text, count=1)
    return _labelled(_alone(text if found.encloses else _clause(text)), f"'{found.anchor}'")


def read_gold_number(text: str) -> AnswerReading:
    """Read a gold column's number: the announced one (`... #### 18`), else the whole text, never a part of it."""
    if anchored(text, "number") is not None:
        return read_number(text)
    return _labelled(_alone(clean(text)), "whole text")


def clean(text: str) -> str:
    """Write LaTeX, full-width and currency spellings of a short text in plain characters, without spaces around it."""
    if not text.isascii():
        text = text.translate(_TO_ASCII)
    if "<<" in text:
        text = CALCULATOR.sub("", text)
    if "\\" in text:
        for mark, plain in (("\\$", "$"), ("\\%", "%"), ("\\,", ""), ("\\!", "")):
            text = text.replace(mark, plain)
        text = _DEGREES.sub("°", _DELIMITERS.sub(" ", _UNWRAP.sub(r" \1 ", text)))
        text = _FRACTION.sub(_plain_fraction, text)
    return text.replace("{,}", ",").replace("**", "").replace("-$", "-").replace("$", " ").strip()


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
    mixed = match.string[match.start() - 1 : match.start()].isdigit()
    return f"{' ' if mixed else ''}{top}/{bottom}"


def _labelled(reading: AnswerReading, anchor: str) -> AnswerReading:
    return AnswerReading(reading.value, reading.status, f"{anchor}: {reading.detail}")


def _no_answer(text: str) -> AnswerReading:
    return AnswerReading(None, "no_answer", f"no number in '{text[:60]}'" if text else "no number")


def _part_of(text: str) -> AnswerReading:
    return AnswerReading(None, "no_answer", f"'{text[:60]}' is more than a number")


def _conflict(text: str) -> AnswerReading:
    return AnswerReading(None, "conflict", f"several numbers in '{text[:60]}'")


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the unsigned value of a `_NUMBER` match; None above MAX_DIGITS digits and for a division by zero."""
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


def _alone(text: str) -> AnswerReading:
    """Read a cleaned text that is one number with at most its sign, percent and unit."""
    match = _ALONE.fullmatch(text)
    if match is None:
        return _no_answer(text)
    rest = match["rest"]
    if _ANOTHER.match(rest):
        return _conflict(text)
    unit = rest.rstrip(_CLOSING)
    is_unit = _UNIT.fullmatch(unit) and len(unit.split()) <= _MAX_UNIT_WORDS and not _CHANGED.search(unit)
    value = None if _PART.match(rest) or not is_unit else _value(match)
    if value is None:
        return _part_of(text)
    return AnswerReading(-value if match["sign"] == "-" else value, "ok", text[:60])


def _clause(line: str) -> str:
    """Cut a line behind its first number and unit; return the whole line where the sentence goes on to deny it."""
    match = _ALONE.match(line)
    if match is None or _ANOTHER.match(match["rest"]) or _PART.match(match["rest"]):
        return line
    sentence = _SENTENCE_END.split(match["rest"], maxsplit=1)[0]
    if _CHANGED.search(sentence):
        return line
    return line[: match.start("rest")] + _CLAUSE_END.split(sentence, maxsplit=1)[0]


def _last_in_text(text: str) -> AnswerReading:
    """Read the last number of the last line that holds a digit (digits in names such as v2 aside)."""
    end = len(text)
    while end > 0:
        start = text.rfind("\n", 0, end) + 1
        if _DIGIT.search(text, start, end):
            line = clean(text[start:end])
            matches = list(_IN_TEXT.finditer(line))
            if not matches or denied(line, matches[-1].start()):
                return _part_of(line)
            return _in_text(line, matches[-1])
        end = start - 1
    return _no_answer("")


def _in_text(text: str, match: re.Match[str]) -> AnswerReading:
    if _PART.match(text, match.end()):
        return _part_of(text[match.start() : match.start() + 60])
    before = text[max(0, match.start() - 2) : match.start()]
    # A minus behind a letter, a digit or a bracket is a hyphen or a subtraction.
    negative = before.endswith("-") and not (before[:-1].isalnum() or before[:-1] in (")", "}", "%"))
    value = _value(match)
    shown = ("-" if negative else "") + match[0].strip()
    if value is None:
        return _part_of(shown)
    return AnswerReading(-value if negative else value, "ok", shown)


def _right_side(text: str) -> tuple[str, bool]:
    """Return the text behind the last "=" of an equation, and True when the sides are different numbers.

    `x = 18`, `total cost = 18` and `2 * 9 = 18` give `18`; `5 = 3` is a contradiction; prose and equations in several
    variables before the "=" leave the text as it is.
    """
    *left, right = text.split("=")
    if len(left) > _MAX_SIDES or not all(
        _LEFT.fullmatch(side.strip()) and not denied(side, len(side)) for side in left
    ):
        return text, False
    sides = {_alone(side.strip()).value for side in (*left, right)} - {None}
    return right.strip(), len(sides) > 1

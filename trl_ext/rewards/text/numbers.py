r"""Read exact numbers from text.

It reads thousands separators (`1,234`, `10{,}000`), decimals, exponents (`1.5e3`), fractions and mixed numbers
(`1 1/2`, `\frac{1}{2}`), signs, currency, percent, units in words, full-width digits. Values are exact: 0.33 is not
1/3. Percent signs and units are dropped, not converted: `50%` is 50, and neither `0.5` nor `1/2`.

A part of a larger expression is no number: `3\sqrt{13}`, `2^10` and `3x` give no number, and neither do an announced
`5=3` and `3 or 5`. A rule that read 3 there would reward fragments.

An announced number may have a currency, an `x =` or `2 * 9 =`, and a word such as "therefore" before it, and a unit in
words after it. In free prose too many words change a number ("anything but 3").

Every pattern takes linear time: each repetition is possessive (`*+`), bounded, or disjoint from the next part.
"""

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial

from trl_ext.rewards.text import number_words as known
from trl_ext.rewards.text.denial import DENIAL, denied_before, denied_behind, without_contrast
from trl_ext.rewards.text.phrases import OR
from trl_ext.rewards.text.prose import CALCULATOR, UNSPACED
from trl_ext.rewards.text.reader import LEADS, AnswerReading, Candidate, find_answer, read_all
from trl_ext.rewards.text.task import without_brackets

MAX_DIGITS = 100  # A model that loops writes more; the cost of exact arithmetic grows with the square.

# `3,5` and `0,125` are decimals, `1,234` is not; `1,2,3` is a list, (3,5) a point.
_COMMA = r"[0-9]{1,99},(?:[0-9]{1,2}|[0-9]{4,99}|(?<![0-9]0,)(?<=0,)[0-9]{3})(?![0-9)]|[,.][0-9])"
_PLAIN = rf"(?:{_COMMA}|(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = (
    rf"(?:(?P<whole>[0-9]+)\ (?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<plain>{_PLAIN}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)(?:/(?P<over>{_PLAIN}))?)"
)
_DECIMAL_COMMA = re.compile(_COMMA)
_ALONE = re.compile(rf"(?P<sign>[-+]?)\s?{_NUMBER}(?P<rest>.*)", re.DOTALL)
_IN_TEXT = re.compile(rf"(?<![0-9A-Za-z_^.\\{{/])(?<![0-9][,:]){_NUMBER}")

_SYNONYM = re.compile(rf"\s*[(,]?\s*\bor\b\s*{_NUMBER}(?P<rest>.*)", re.DOTALL)  # 1/2 or 0.5
_DIGIT = re.compile(r"(?<![A-Za-z0-9_.-])[0-9]|(?<![A-Za-z0-9_])[.-][0-9]|frac[0-9]")
# Allowed after a separate number: percent, a unit in words with an exponent, a full stop.
_UNIT = re.compile(r"\s*+[%°]?+(?>(?:[^\W\d_]|[ /.'°-]|\^\{?[23]\}?)*)")
_VARIABLE = re.compile(r"(?!m[²³])[A-Za-z](?![A-Za-z])|\s*[π√∞]|[²³¹\u2070-\u207f]")
# Plain-text mathematics: after a number it changes the number, before a number it takes it as its argument.
_NAMES = r"(?:sqrt|cbrt|(?:square\s|cube\s)?root|arc(?:sin|cos|tan)|sinh?|cosh?|tanh?|cot|csc|log|ln|exp|mod|gamma)"
_OPERATES = (
    r"(?>(?:\b(?:plus|minus|times|over|per|divided\ by|multiplied\ by|to\ the|the)\s|[*/\u00d7\u00f7\u00b7\s])*)"
    rf"(?:{_NAMES}(?:\s?[(^{{[0-9_]|\s(?:of\s)?[a-z](?![a-z])|\s(?:of\s)?(?:pi|theta|alpha)\b)"
    r"|(?:sqrt|cbrt|ln|square\sroot|cube\sroot)(?![a-z])|(?:pi|e|theta|alpha|[nxyz])(?![\w'-]|\.\s?[a-z])"
    r"|[a-z]{1,3}\((?!e?s\))|(?:squared|cubed|factorial|doubled|halved|tripled|raised\sto|choose)\b"
    r"|(?:more|less|fewer)\sthan\s[b-z](?![\w'])|(?<=\bto\sthe\s)(?:power|fourth|fifth|nth|n)\b)"
)
_APPLIED = re.compile(
    rf"(?:{_NAMES}|raised\sto|power|choose)(?:\sof)?\s?(?:[({{\[][^)}}\]]{{0,40}}|\([^()]{{0,40}}\)\s?[-+*/^]\s?)?\s?-?\Z",
    re.IGNORECASE,
)
# After a number in running text it shows that the number is part of a larger expression.
_PART = re.compile(
    r"\s*[\^√π∞\\]|\s*[-+*\u00d7\u00f7\u00b7/]\s*[0-9(\\]|[,.:/][0-9]|[_{]|"
    rf"{_VARIABLE.pattern}|(?i:{_OPERATES})"
)
_ANOTHER = re.compile(rf"\s*[(,;]?\s?(?:,|;|、|or\b|and\b|{OR})\s*[-+]?[0-9]")
_BEFORE = re.compile(LEADS, re.IGNORECASE)  # once `clean` has removed LaTeX and currencies
_CLOSING = " \t)]\"'*_`!,;:\u3002"
# The left side of an equation that gives a number: a variable, one or two words, or arithmetic.
_LEFT = re.compile(
    r"[A-Za-z](?:_?\{?\w\}?)?|[A-Za-z]{3,40}(?:\ [A-Za-z]{3,40})?"
    r"|(?:[-+*/\u00d7\u00f7\u00b7().,0-9\s%]|\\(?:times|cdot|div)|(?<=[0-9)\s])x(?=\s?[0-9(]))*"
)
_MAX_SIDES = 20  # of an equation such as 2 * 3 * 7 = 6 * 7 = 42
_SENTENCE_END = re.compile(r"[!\n\u3002]|\.(?=\s|\Z)(?!(?<=\s[A-Z]\.)\s[a-z])")  # not in "E. coli"
_CLAUSE_END = re.compile(
    r"[,;:(<]|\b(?:because|since|which|even|though|although|but|so|as|when|where|while|given|if|who|that|after|before"
    r"|with\s(?:an?|the|its|his|her|their)\s(?!remainder))\b"
)
_CHANGED = re.compile(
    rf"{DENIAL}|\b(?:plus|minus|halves|thirds|quarters|or|power\ of|(?:multiplied|divided)\ by|raised)\b"
    rf"|(?<![a-z.]){_OPERATES}|\bto\ the\ (?:\w{{1,9}}\ )?(?:power|fourth|fifth|nth)\b|\b{_NAMES}\Z"
    r"|(?-i:(?<![\w.'-])[eijknpqruvwxyz](?![\w'-]|\.[a-z]))",
    re.IGNORECASE,
)
MULTIPLIER = re.compile(
    rf"[\s$*)]{{0,3}}-?\s?(?:\\text\{{\s?)?({known.FACTOR}(?:\s?{known.FACTOR})?)\.?\}}?|{known.AND_A_HALF}",
    re.IGNORECASE,
)
_FACTOR = re.compile(known.FACTOR)
HALF = re.compile(r"(?:(?:one|a)\s)?half\b(?!\s?(?:of|a)\b)", re.IGNORECASE)
_MAX_UNIT_WORDS = 8  # "dollars every day at the farmers' market"

# Full-width characters become ASCII, dashes a minus, currencies a dollar.
_TO_ASCII: dict[int, int | str] = dict.fromkeys(map(ord, "\u2013\u2014"), ord("-"))
_TO_ASCII |= dict.fromkeys(map(ord, "\u20ac\u00a3\u00a5"), ord("$"))
_TO_ASCII |= {ord("½"): " 1/2", ord("¼"): " 1/4", ord("¾"): " 3/4"}
_BINDS = re.compile(rf"[^\W{UNSPACED}]-\Z|[)}}%]-\Z")  # a minus that is a hyphen or a subtraction
_FRACTION = re.compile(r"\\[dt]?frac\{\s?([0-9.,]+)\s?\}\{\s?([0-9.,]+)\s?\}|\\[dt]?frac([0-9])([0-9])")
_UNWRAP = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_DELIMITERS = re.compile(r"\\[()\[\] ;]|\\(?:left|right)(?![A-Za-z])")
CLOCK = re.compile(r"(?i)(?<![0-9:.])([01]?[0-9]|2[0-3]):([0-5][0-9])(?![0-9:.]?[0-9])(?:\s{0,3}([ap])\.?\s?m\b\.?)?")
_GROUPED = re.compile(r"[1-9](?<![0-9.,/:^][1-9])[0-9]{0,2}(?:[ '][0-9]{3})+(?![0-9/:^])")  # 1 234, 1'234
_DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?")


def read_number(text: str) -> AnswerReading:
    r"""Read the announced number (see `reader`) of a visible text, or without an announcement its last number.

    Example:
        >>> read_number("16 - 3 = 13 eggs, so she earns $26.").value, read_number("A: 1,018 dollars").value
        (Fraction(26, 1), Fraction(1018, 1))
    """
    found = find_answer(text, "number")
    return _labelled(last_number(text), "last number") if found is None else stated_number(found)


def stated_number(found: Candidate) -> AnswerReading:
    """Read the number in a stated answer; different numbers are a conflict; an undecided answer gives a pair."""
    return read_all(found, partial(_content, encloses=found.encloses))


def _content(content: str, *, encloses: bool) -> AnswerReading:
    text, contradiction = _right_side(clean(without_brackets(content)))
    if contradiction:
        return _conflict(text)
    text = _BEFORE.sub("", text, count=1)
    return _alone(text if encloses else _clause(text))


def read_gold_number(text: str) -> AnswerReading:
    """Read a gold column's announced number (`... #### 18`), else the whole text, never a part of it."""
    found = find_answer(text, "number", trusted=True)
    reading = _labelled(_alone(clean(without_brackets(text))), "whole text") if found is None else stated_number(found)
    # A column's `14,16` may be a list.
    return _conflict(reading.detail) if _DECIMAL_COMMA.search(reading.detail) else reading


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
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return text.replace("{,}", ",").replace("**", "").replace("-$", "-").replace("$", " ").strip()


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
    mixed = match.string[match.start() - 1 : match.start()].isdigit()
    return f"{' ' if mixed else ''}{top}/{bottom}"


def _labelled(reading: AnswerReading, anchor: str) -> AnswerReading:
    return replace(reading, detail=f"{anchor}: {reading.detail}")


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


def _is_left(match: re.Match[str]) -> bool:
    """Return True if a `_NUMBER` match is a quotient with a whole value, such as `36/2`."""
    top, bottom = match["top"] or match["plain"], match["bottom"] or match["over"] or ""
    return top.isdigit() and bottom.isdigit() and int(top) % int(bottom) == 0


def _fraction(digits: str) -> Fraction:
    if digits.isdigit():
        return Fraction(int(digits))
    return Fraction(digits.replace(",", "." if _DECIMAL_COMMA.fullmatch(digits) else ""))


def _alone(text: str) -> AnswerReading:
    """Read a cleaned text that holds only a number with its sign, percent and unit."""
    if clock := CLOCK.match(text):  # The same words may follow a time and a number.
        reading = _alone(_clause("0" + text[clock.end() :]))
        return reading if reading.value is None else AnswerReading(time_of(clock), "ok", text[:60])
    match = _ALONE.fullmatch(text)
    if match is None:
        return _half(text)
    rest: str | None = match["rest"]
    value = None if _PART.match(match["rest"]) and not MULTIPLIER.match(match["rest"]) else _value(match)
    if _ANOTHER.match(match["rest"]):
        rest = _behind_synonym(match["rest"], value)
    if rest is None:
        return _conflict(text)
    multiplier = MULTIPLIER.match(rest)
    if value is not None and multiplier:
        value = _multiply(value, multiplier)
        rest = rest[multiplier.end() :]
    if value is None or not _is_unit(rest):
        return _part_of(text)
    return AnswerReading(-value if match["sign"] == "-" else value, "ok", text[:60], _is_left(match))


def _half(text: str) -> AnswerReading:
    half = HALF.match(text)
    is_half = half is not None and _is_unit(text[half.end() :])
    return AnswerReading(Fraction(1, 2), "ok", text[:60]) if is_half else _no_answer(text)


def _behind_synonym(rest: str, value: Fraction | None) -> str | None:
    """Return the text after the same value in other digits, as in "1/2 or 0.5"; None for another value."""
    synonym = _SYNONYM.match(rest)
    is_same = synonym is not None and value is not None and _value(synonym) == value
    return synonym["rest"].lstrip(" )") if synonym and is_same else None


def time_of(clock: re.Match[str]) -> str:
    """Return a time on twelve hours, with "am" or "pm" if known: "4:30 pm" for "16:30"."""
    hour, half = int(clock[1]), (clock[3] or "").lower()
    if not 0 < hour <= 12:
        hour, half = abs(hour - 12), "p" if hour else "a"
    return f"{hour}:{clock[2]}" + (f" {half}m" if half else "")


def _is_unit(rest: str) -> bool:
    unit = rest.rstrip(_CLOSING)
    is_unit = _UNIT.fullmatch(unit) is not None and len(unit.split()) <= _MAX_UNIT_WORDS
    changes = _CHANGED.search(unit) or ((not unit.isascii() or " " in unit) and known.CHANGES_BEHIND.match(unit))
    return is_unit and not changes and not denied_behind(unit, 0)


def _multiply(value: Fraction, multiplier: re.Match[str]) -> Fraction:
    """Return 42 million for "42" and "million", 42.5 for "and a half"."""
    if multiplier[1] is None:
        return value + Fraction(1, 2)
    return value * math.prod(known.FACTORS[word] for word in _FACTOR.findall(multiplier[1].lower()))


def _clause(line: str) -> str:
    """Cut a line after its first number and unit; return the whole line if the sentence denies the number."""
    match = _ALONE.match(line)
    if match is None or _ANOTHER.match(match["rest"]) or _PART.match(match["rest"]):
        return line
    sentence = _SENTENCE_END.split(match["rest"], maxsplit=1)[0]
    if denied_behind(sentence, 0):
        return line
    return line[: match.start("rest")] + _CLAUSE_END.split(sentence, maxsplit=1)[0]


def last_number(text: str) -> AnswerReading:
    """Read the last number of the last line that holds a digit (digits in names such as v2 aside)."""
    end = len(text)
    while end > 0:
        start = text.rfind("\n", 0, end) + 1
        if _DIGIT.search(text, start, end):
            line = known.in_signs(clean(without_contrast(text[start:end])))
            matches = list(_IN_TEXT.finditer(line))
            if not matches or denied_before(line, matches[-1].start()) or denied_behind(line, matches[-1].end()):
                return _part_of(line)
            return _in_text(line, matches[-1])
        end = start - 1
    return _no_answer("")


def _in_text(text: str, match: re.Match[str]) -> AnswerReading:
    if clock := CLOCK.match(text, match.start()):
        return AnswerReading(time_of(clock), "ok", clock[0])
    if _PART.match(text, match.end()):
        return _part_of(text[match.start() : match.start() + 60])
    multiplier = MULTIPLIER.match(text, match.end())
    before = text[max(0, match.start() - 70) : match.start()]
    if (
        _APPLIED.search(before)
        or known.CHANGES_BEFORE.search(before)
        or (known.CHANGES_BEHIND.match(text, match.end()) and not multiplier)
    ):
        return _part_of(text[max(0, match.start() - 30) : match.start() + 30])
    negative = before.endswith("-") and not _BINDS.search(before)
    value = _value(match)
    if value is not None and multiplier:
        value = _multiply(value, multiplier)
    shown = ("-" if negative else "") + match[0].strip()
    if value is None:
        return _part_of(shown)
    return AnswerReading(-value if negative else value, "ok", shown, _is_left(match))


def _right_side(text: str) -> tuple[str, bool]:
    """Return the text after the last "=" of an equation, and whether the sides are different numbers.

    `x = 18`, `total cost = 18` and `2 * 9 = 18` give `18`; `5 = 3` is a contradiction; with prose or several variables
    before the "=", the text is returned unchanged.
    """
    if "=" not in text:
        return text.strip(), False
    *left, right = text.split("=")
    if len(left) > _MAX_SIDES or not all(
        _LEFT.fullmatch(side.strip()) and not denied_before(side, len(side)) for side in left
    ):
        return text, False
    sides = {_alone(side.strip()).value for side in (*left, right)} - {None}
    return right.strip(), len(sides) > 1

"""Define an instruction: its id, its arguments, and the test of a text; split a text into sentences and words.

A test gets the response (normalised, without reasoning, not blank) and the arguments as read; it never raises.
"""

import operator
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trl_ext.rewards.text.prose import normalized

Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One verifiable instruction.

    Args:
        id: `family:name`, as in the benchmark's data set.
        follows: Called with the response and the arguments; True if the response follows the instruction.
        arguments: Each argument's name and reader; all are required.
    """

    id: str
    follows: Callable[..., bool]
    arguments: Mapping[str, Reader]

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Read the arguments; ValueError names a missing, unknown or unreadable argument.

        A null counts as absent: tables with a column for each argument of all instructions are full of nulls.
        """
        given = {name: value for name, value in given.items() if value is not None}
        for name in (*self.arguments, *given):
            if name not in given or name not in self.arguments:
                raise ValueError(f"{self.id}: argument {name!r} is {'unknown' if name in given else 'missing'}")
        read = {}
        for name, value in given.items():
            try:
                read[name] = self.arguments[name](value)
            except ValueError as error:
                raise ValueError(f"{self.id}: {name} is {value!r}, not {error}") from error
        return read


def instruction(id: str, /, **arguments: Reader) -> Callable[[Callable[..., bool]], Instruction]:
    """Make an Instruction of the decorated test; the arguments are as in Instruction."""
    return lambda follows: Instruction(id, follows, arguments)


# Comparisons of a count with a bound. The paper does not define "around"; open-instruct reads it as here.
Relation = Callable[[int, int], bool]
_RELATIONS: dict[str, Relation] = {
    "at least": operator.ge,
    "at most": operator.le,
    "less than": operator.lt,
    "exactly": operator.eq,
    "around": lambda count, bound: abs(count - bound) <= max(1, round(bound / 10)),
}


def divided(response: str, mark: str) -> list[str]:
    """Split a response at a mark; a mark before the first part or after the last is ignored."""
    parts = [part.strip() for part in response.strip().split(mark)]
    return parts[(not parts[0]) : len(parts) - (not parts[-1])]


def relation(value: Any) -> Relation:
    """Read a relation by its name."""
    if not isinstance(value, str) or value not in _RELATIONS:
        raise ValueError("'at least', 'at most', 'less than', 'exactly' or 'around'")
    return _RELATIONS[value]


def text(value: Any) -> str:
    """Read a string that is not blank, normalised as the response is."""
    if not isinstance(value, str) or not normalized(value).strip():
        raise ValueError("a text that is not blank")
    return normalized(value).strip()


def raw_text(value: Any) -> str:
    """Read a string that is not blank, unchanged, because positions in it count."""
    return str(text(value) and value)


def word(value: Any) -> str:
    """Read one word, or a list with one word."""
    found = text(value[0] if isinstance(value, list | tuple) and len(value) == 1 else value)
    if len(found.split()) > 1:
        raise ValueError("one word")
    return found


def texts(value: Any) -> tuple[str, ...]:
    """Read a list of strings that are not blank."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("a list of texts")
    return tuple(map(text, value))


def letter(value: Any) -> str:
    """Read one visible character; it may be "#" or "!"."""
    if not isinstance(value, str) or len(normalized(value).strip()) != 1:
        raise ValueError("one character")
    return normalized(value).strip()


def count(value: Any) -> int:
    """Read a whole number from 0, also as a float: tables with nulls turn whole numbers into floats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or not 0 <= value <= 1e9:
        raise ValueError("a whole number from 0")
    return int(value)


def positive(value: Any) -> int:
    """Read a whole number from 1."""
    if count(value) < 1:
        raise ValueError("a whole number from 1")
    return int(value)


# The end of a sentence, with closing quotes and brackets after it.
_END = re.compile(
    r"(?<![.!?\u203d])[.!?\u203d]++[\"')\]*_\u201d\u2019\u00bb]*+(?=\s|\Z)|[\u3002\uff01\uff1f\u0964\u06d4]++"
)
_OPENERS = " \t\n\"'(*_\u201c\u2018"
# A full stop after one of these, or after a single letter, ends no sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs e.g i.e cf fig vol approx inc ltd co dept gen rev a.k.a u.s a.m p.m".split()
)


@lru_cache(maxsize=8)  # Several instructions of a row split the same text.
def sentences(text: str) -> tuple[str, ...]:
    """Split a text at `.`, `!` and `?` before a space, unless it belongs to an abbreviation; line breaks end nothing.

    Example:
        >>> sentences("Dr. Ada paid $3.50. Why? She had to")
        ('Dr. Ada paid $3.50.', 'Why?', 'She had to')
    """
    found = []
    start = 0
    capitals = not text.islower()
    for match in _END.finditer(text):
        if match.group().startswith(".") and _goes_on(text, match.start(), match.end(), capitals=capitals):
            continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    found.append(text[start:].strip())
    return tuple(sentence for sentence in found if sentence)


def _goes_on(text: str, stop: int, end: int, capitals: bool) -> bool:
    """Return True if the full stop belongs to an abbreviation or a list's number, or a small letter follows.

    Args:
        text: The whole text.
        stop: Index of the full stop.
        end: Index of the first character after the full stop and its closing marks.
        capitals: Whether the text has capital letters; without, small letters do not count.
    """
    following = text[end : end + 20].lstrip(_OPENERS)[:1]
    if capitals and following.islower():
        return True
    before = text[max(0, stop - 20) : stop]
    last = before.split()[-1].strip(_OPENERS).casefold() if before and not before[-1].isspace() else ""
    if last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i"):
        return True
    if last == "no" and following.isdigit():
        return True
    line = before.rpartition("\n")[2] if "\n" in before or stop <= 20 else "-"
    return line.strip(" \t*_#-").isdigit()


def stripped_words(text: str) -> list[str]:
    """Split a text at its spaces and strip ASCII punctuation around the words.

    Example:
        >>> stripped_words("(Don't) - go!")
        ["Don't", 'go']
    """
    bare = (part.strip(string.punctuation) for part in text.split())
    return [word for word in bare if word]

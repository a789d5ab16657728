"""Split a text into sentences and words, as instructions count them, in linear time."""

import re
import string
from functools import lru_cache

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

    Without `capitals` in the text, small letters do not count.
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
    return [word for word in (part.strip(string.punctuation) for part in text.split()) if word]

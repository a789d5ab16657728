r"""Find the phrases of the table of announcements in a text.

`str.rfind`, which is fast, looks for each word of the table; only where it occurs, the patterns of its rows are tried.
Every pattern reads a bounded number of characters, so the time is linear in the text.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from trl_ext.rewards.text.announcements import CHINESE, ENGLISH, Announcement
from trl_ext.rewards.text.languages import OTHERS

LANGUAGES = (ENGLISH, CHINESE, *OTHERS)

_MAX_PLACES = 32  # of each word, from the end of the text on
_BEFORE = 100  # characters before a word that are read


def _any_of(field: str) -> str:
    """Return a pattern for the words that any language has in a field of LanguageBlock."""
    return f"(?:{'|'.join(filter(None, map(attrgetter(field), LANGUAGES)))})"


# Words of all languages, for the patterns of other files.
NOUNS, DENIES, WRONG, OR, _ENDS = map(_any_of, ("nouns", "denies", "wrong", "joins", "ends"))
LEADS = rf"[\s(\[*\"'`\u2705]*+(?>(?:(?:{NOUNS}|(?:la|die)\s|l')\s*+){{0,2}})"
LETTER = rf"{LEADS}[(\[*\"']*+(?P<letter>[A-Z])(?![A-Za-z0-9\u00c0-\u024f]|'[A-Za-z])"
_ONE_OF_TWO = re.compile(rf"[A-Z](?![a-z])[)*]{{0,3}}\s?(?:[,/&、]|{OR})\s?[(*]{{0,3}}\Z")  # "B and C are right"
ENDS = re.compile(rf"\s?{_ENDS}[.\u3002!*]{{0,4}}\s*\Z")


@dataclass(frozen=True, slots=True)
class Phrase:
    """A phrase that announces an answer, such as "the answer is".

    Args:
        row: Its row of the table.
        anchor: Its text.
        start: Position of its word, or of its letter.
        end: Position of the first character after it.
        letter: The choice that the phrase itself holds ("B is correct"), or "": the answer follows.
    """

    row: Announcement
    anchor: str
    start: int
    end: int
    letter: str = ""

    @property
    def is_foreign(self) -> bool:
        """True if the answer follows a phrase that is not English."""
        return self.row.language not in ("", "English") and not self.letter


def find_phrases(text: str, kind: str, start: int = 0) -> list[Phrase]:
    """Return the phrases after `start` that announce an answer of a kind: "number", "maths", "exact" or "choice"."""
    rest = text[start:]
    lowered = rest.lower()
    if len(lowered) != len(rest):  # The lower case of a few letters is longer, which would shift all positions.
        lowered = rest
    rows = _matchers(kind, is_ascii=lowered.isascii())
    found: list[Phrase | None] = []
    for word, matchers in [row for row in rows if row[0] in lowered]:
        place = len(lowered)
        for _ in range(_MAX_PLACES):
            place = lowered.rfind(word, 0, place)
            if place < 0:
                break
            for matcher in matchers:
                match = matcher.pattern.match(text, start + place)
                if match:
                    found.append(matcher.phrase(match))
    return [*filter(None, found)]


@dataclass(frozen=True, slots=True)
class _Matcher:
    """A row with its compiled patterns."""

    row: Announcement
    pattern: re.Pattern[str]
    before: re.Pattern[str]
    unless: re.Pattern[str]

    def phrase(self, match: re.Match[str]) -> Phrase | None:
        """Return the phrase that the row's pattern has found; None if the text before it is not as it must be."""
        text, place = match.string, match.start()
        window = max(0, place - _BEFORE)
        before = self.before.search(text, window, place)
        if before is None or (self.row.unless and self.unless.search(text, window, place)):
            return None
        anchor, end = match[0].strip(), match.end()
        for found in (match, before):
            if "letter" in found.re.groupindex:
                start = found.start("letter")
                is_one_of_two = _ONE_OF_TWO.search(text, max(0, start - 20), start)
                return None if is_one_of_two else Phrase(self.row, anchor, start, end, text[start])
        return Phrase(self.row, anchor, place, end)


@cache
def _matchers(kind: str, *, is_ascii: bool) -> tuple[tuple[str, tuple[_Matcher, ...]], ...]:
    """Return the rows of a kind by word; for texts in ASCII without the words that have other characters."""
    kinds = ("any", "choice") if kind == "choice" else ("any", "value")
    found: dict[str, list[_Matcher]] = defaultdict(list)
    for row in (row for language in LANGUAGES for row in language.announcements if row.kind in kinds):
        patterns = [re.compile(one, re.IGNORECASE) for one in (row.pattern, row.before, row.unless)]
        for word in row.words.split("|"):
            found[word].append(_Matcher(row, *patterns))
    return tuple((word, tuple(rows)) for word, rows in found.items() if word.isascii() or not is_ascii)

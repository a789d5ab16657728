r"""Read the chosen letter, A to Z, of a multiple-choice answer.

An announced choice (see `reader`) is the letter that opens the content: `\boxed{\text{(B)}}`, "answer is B because".
Without an announcement it is the only letter in brackets or after "option", the letter that opens the text
("B) Paris"), or the letter that is the last line. Several letters ("A or B", "(A) and (B)") are a conflict, so listing
the options earns nothing; denied letters do not count.
"""

import re
from operator import itemgetter

from trl_ext.rewards.text.denial import DENIAL, denied_before, denied_behind
from trl_ext.rewards.text.numbers import clean
from trl_ext.rewards.text.phrases import LEADS, LETTER, NOUNS, OR
from trl_ext.rewards.text.reader import AnswerReading, find_answer, read_all

_OPENING = re.compile(LETTER, re.IGNORECASE)
_QUOTED = re.compile(r"[\"']([A-Z])[\"']")
_ANOTHER = re.compile(
    rf"[)\].*\s]*+(?:[,;/&|、]|\bor\b|\band\b|{OR})(?i:{LEADS})[(\[*]*+[A-Z](?![A-Za-z])|\)\s?\([A-Z]\)"
)
_SHOWN = re.compile(r"[(\[]([A-J])[)\]]|(?:[Oo]ption|[Cc]hoice)(?<!\w.{6}):?\s[*(\[]{0,3}([A-Z])(?![A-Za-z0-9'])")
_SHOWN_ABROAD = re.compile(rf"{_SHOWN.pattern}|(?i:{NOUNS})\s?[*(\[]{{0,3}}([A-Z])(?![A-Za-z0-9'])")
_ASCII_NOUNS = ("antwort", "respuesta", "risposta", "resposta", "letra", "alternativa")
_REJECTED = re.compile(
    rf"[)\].*\s]*+(?:is|was)\s*+(?:{DENIAL}|wrong|incorrect|false|untrue|an?\sdistractor)", re.IGNORECASE
)
_LISTED = re.compile(r"\s*\**([A-Z])(?:[.)\u3002]|\**\s*\Z)")
_OPTIONS = re.compile(  # all options again: "A. 1 B. 2 C. 3", also in lines
    r"\W{0,3}A[.):]\s[^.\n]{1,80}?[ \t]B[.):]\s|[ \t*(]{0,3}A[.)][^\n]*\n+[ \t*(]{0,3}B[.)]"
)
_LABELLED = re.compile(r"^[ \t*]{0,9}([A-Z])\**(?::|\s-\s)", re.MULTILINE)
_CONCLUDED = re.compile(
    r"\b(?:it's|(?:it|that)\sis|thus,?|so,?|hence,?|therefore,?|based\son\s[^.,:\n]{1,60},)\s[*(]{0,3}((?-i:[A-Z]))[*).\s]{0,9}\Z",
    re.IGNORECASE,
)
_LONE = re.compile(r"^[ \t*$(\[]{0,9}([A-Z])[ \t*$)\].]{0,9}$", re.MULTILINE)
_TERM = re.compile(r"[\^_']|\((?![^\x00-\x7f])|\s?[+=!]|\s?-\s?[0-9]")  # after a constant: C^2 is no letter
_MAX_DENIALS = 64  # the last letters in the text that are checked for a denial
# "a" and "I" are words as well: letters only if no small word follows, except words that continue an answer.
_ARTICLE = re.compile(r"\s+(?!(?:because|since|as|and|or|which|is|was|with|for|but|not|rather)\b)[a-z]")


def read_choice(text: str) -> AnswerReading:
    """Read the letter that a visible text gives as its answer.

    Example:
        >>> read_choice("The answer is (B) Paris.").value, read_choice("A or B").value
        ('B', None)
    """
    found = find_answer(text, "choice")
    return _without_phrase(text) if found is None else read_all(found, letter_of)


def letter_of(content: str) -> AnswerReading:
    """Read the letter that opens an answer; the text of its option may follow."""
    content = _QUOTED.sub(itemgetter(1), clean(content)).strip("'\"` \u2705")
    match = _OPENING.match(content)
    # A small letter counts only if it is the whole content: "a" opens many sentences.
    is_word = match is not None and (
        (match["letter"].islower() and len(content.strip(" ()[]*.")) != 1)
        or (match["letter"] in "AI" and _ARTICLE.match(content, match.end()) is not None)
    )
    if (
        match is None
        or is_word
        or _TERM.match(content, match.end())
        or _REJECTED.match(content, match.end())
        or denied_behind(content, match.end())
    ):
        return AnswerReading(None, "no_answer", f"no letter A to Z at the start of '{content[:60]}'")
    if _ANOTHER.match(content, match.end()) or _OPTIONS.match(content):
        return AnswerReading(None, "conflict", f"several letters in '{content[:60]}'")
    return AnswerReading(match["letter"].upper(), "ok", match["letter"].upper())


def _without_phrase(text: str) -> AnswerReading:
    """Read the only letter in brackets, the letter that opens the text, or the letter that ends it."""
    text = _QUOTED.sub(itemgetter(1), text)
    if len(text.strip()) <= len("(b).") or _OPTIONS.match(text):
        return letter_of(text)
    shown = _in_brackets(text)
    if shown is not None:
        return shown
    letter = _letter_at_an_end(text)
    if letter is None:
        return AnswerReading(None, "no_answer", "no letter A to Z is announced, in brackets or at the start")
    return AnswerReading(letter, "ok", f"letter: {letter}")


def _in_brackets(text: str) -> AnswerReading | None:
    """Read the letters in brackets or after "option": several are a conflict; None if there are none."""
    is_english = (lowered := text.lower()).isascii() and not any(noun in lowered for noun in _ASCII_NOUNS)
    shown = [*(_SHOWN if is_english else _SHOWN_ABROAD).finditer(text)]
    if not shown:
        return None
    last = shown[-_MAX_DENIALS:]
    kept = shown[:-_MAX_DENIALS] + [match for match in last if not _is_denied(text, match)]
    letters = {match[match.lastindex or 0] for match in kept}
    if len(letters) > 1 or any(_ANOTHER.match(text, match.end()) for match in last):
        return AnswerReading(None, "conflict", f"letters {', '.join(sorted(letters))}")
    if not letters:
        return AnswerReading(None, "no_answer", f"letter {shown[-1][shown[-1].lastindex or 0]} is denied")
    letter = letters.pop()
    return AnswerReading(letter, "ok", f"letter: {letter}")


def _is_denied(text: str, match: re.Match[str]) -> bool:
    rejected = _REJECTED.match(text, match.end()) is not None
    return rejected or denied_before(text, match.start()) or denied_behind(text, match.end())


def _letter_at_an_end(text: str) -> str | None:
    """Return the letter that opens a text, or that is its conclusion or its whole last line."""
    if listed := _LISTED.match(text):
        return listed[1]
    labelled = {match[1] for match in _LABELLED.finditer(text)}
    if len(labelled) == 1 and (match := _LABELLED.match(text)):  # "A: Paris\nB: Rome" is a list of options.
        return match[1]
    if match := _CONCLUDED.search(text[-100:]):
        return match[1]
    last = _LONE.fullmatch(text.rstrip().rpartition("\n")[2])
    is_only = last is not None and len({match[1] for match in _LONE.finditer(text)}) == 1
    return last[1] if last and is_only else None

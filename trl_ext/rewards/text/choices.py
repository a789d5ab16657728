r"""Read the chosen letter, A to E, of a multiple-choice answer.

An announced choice (see `anchors`) is the letter that opens the content: `\boxed{\text{(B)}}`, "answer is B because".
Without an announcement it is the one letter in brackets, or the letter that opens the text, as in "B) Paris". Several
letters where one is due ("A or B", "(A) and (B)") are a conflict, so listing the options earns nothing.
"""

import re

from trl_ext.rewards.text.anchors import DENIAL, AnswerReading, anchored, denied
from trl_ext.rewards.text.numbers import clean

_OPENING = re.compile(r"[\s(\[*]*+(?>(?:(?:option|choice)\s++)?)[(\[*]*+([A-E])(?![A-Za-z0-9'])", re.IGNORECASE)
_ANOTHER = re.compile(r"[)\].*\s]*+(?:,|;|/|&|、|\bor\b|\band\b|或|和)\s*+[(\[*]*+[A-E](?![A-Za-z])")
_BRACKETED = re.compile(r"[(\[]([A-E])[)\]]")
_REJECTED = re.compile(rf"[)\].*\s]*+(?:is|was)\s*+{DENIAL}", re.IGNORECASE)
_LISTED = re.compile(r"\s*\**([A-E])(?:[.)]|\**\s*\Z)")


def read_choice(text: str) -> AnswerReading:
    """Read the letter that a text gives as its answer.

    Example:
        >>> read_choice("The answer is (B) Paris.").value, read_choice("A or B").value
        ('B', None)
    """
    found = anchored(text, "choice")
    return _bare(text) if found is None else found.conflict or _announced(clean(found.content), found.anchor)


def _announced(content: str, anchor: str) -> AnswerReading:
    match = _OPENING.match(content)
    # A small letter counts only when it is the whole content: "a" opens many a sentence.
    is_word = match is not None and match[1].islower() and len(content.strip(" ()[]*.")) != 1
    if match is None or is_word or _REJECTED.match(content, match.end()):
        return AnswerReading(None, "no_answer", f"'{anchor}': no letter A to E at the start of '{content[:60]}'")
    if _ANOTHER.match(content, match.end()):
        return AnswerReading(None, "conflict", f"'{anchor}': several letters in '{content[:60]}'")
    return AnswerReading(match[1].upper(), "ok", f"'{anchor}': {match[1].upper()}")


def _bare(text: str) -> AnswerReading:
    bracketed = list(_BRACKETED.finditer(text))
    letters = {match[1] for match in bracketed}
    if len(letters) > 1:
        return AnswerReading(None, "conflict", f"bracketed letters {', '.join(sorted(letters))}")
    if bracketed and (denied(text, bracketed[-1].start()) or _REJECTED.match(text, bracketed[-1].end())):
        return AnswerReading(None, "no_answer", f"letter {bracketed[-1][1]} is denied")
    listed = _LISTED.match(text)
    letter = letters.pop() if letters else listed[1] if listed else None
    if letter is None:
        return AnswerReading(None, "no_answer", "no letter A to E is announced, in brackets or at the start")
    return AnswerReading(letter, "ok", f"letter: {letter}")

"""Test instructions about length: words, sentences, paragraphs."""

import re

from trl_ext.rewards.instruction_kinds.spec import Bound, Instruction, count, divided, positive, relation, text
from trl_ext.rewards.text.prose import words

# The end of a sentence, with the quotes and brackets that close behind it. The second half needs no space behind.
_END = re.compile(
    r"(?<![.!?])[.!?]++[\"')\]*_\u201d\u2019\u00bb]*+(?=\s|\Z)"
    r"|[\u3002\uff01\uff1f\u0964\u06d4]++[\"')\]\u201d\u2019\u300d\u300f]*+"
)
_RUN = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n(?:[ \t\r\f\v]*\n)+")
# A full stop behind one of these ends no sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs e.g i.e cf fig no vol approx inc ltd co dept gen rev a.k.a".split()
)


def has_words(response: str, num_words: int, relation: Bound) -> bool:
    """True when there are as many words as the relation to `num_words` asks."""
    return relation.holds(count_words(response), num_words)


def has_sentences(response: str, num_sentences: int, relation: Bound) -> bool:
    """True when there are as many sentences as the relation to `num_sentences` asks."""
    return relation.holds(count_sentences(response), num_sentences)


def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """True when `***` divides the response into that many parts, none of them blank."""
    parts = divided(response, "***")
    return len(parts) == num_paragraphs and all(parts)


def starts_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True when blank lines divide the response into that many paragraphs and the n-th starts with the word."""
    paragraphs = [part for part in _BLANK_LINES.split(response.strip()) if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    start = paragraphs[nth_paragraph - 1].lstrip(" \t\n*_#>\"'\u201c\u2018(").casefold()
    word = first_word.casefold()
    return start.startswith(word) and not start[len(word) : len(word) + 1].isalnum()


def has_two_parts(response: str) -> bool:
    """True when `***` divides the response into two parts, neither of them blank."""
    return has_paragraphs(response, 2)


def has_two_paragraphs(response: str) -> bool:
    """True when blank lines divide the response into two paragraphs."""
    return sum(bool(part.strip()) for part in _BLANK_LINES.split(response.strip())) == 2


def count_words(response: str) -> int:
    """Count runs of letters, digits and "_", so "don't" is two; in scripts without spaces each character is one.

    Example:
        >>> count_words("I don't - do you?"), count_words("做数学")
        (5, 3)
    """
    return sum(len(words(run)) for run in _RUN.findall(response))


def count_sentences(response: str) -> int:
    """Count stretches with a letter or digit that end in `.`, `!`, `?` and the like, at a blank line or with the text.

    A full stop is no end behind an abbreviation, an initial or a number that opens a line ("1."), nor before a small
    letter where there are capitals.

    Example:
        >>> count_sentences("Dr. Ada paid $3.50. Why? (She had to.)")
        3
    """
    return sum(_count_in_paragraph(part) for part in _BLANK_LINES.split(response))


def _count_in_paragraph(paragraph: str) -> int:
    num_sentences = start = 0
    capitals = not paragraph.islower()
    for match in _END.finditer(paragraph):
        if _goes_on(paragraph, match, capitals):
            continue
        num_sentences += _RUN.search(paragraph, start, match.end()) is not None
        start = match.end()
    return num_sentences + (_RUN.search(paragraph, start) is not None)


def _goes_on(paragraph: str, end: "re.Match[str]", capitals: bool) -> bool:
    """Return True when a full stop ends no sentence: it belongs to an abbreviation, or the sentence goes on."""
    if not end.group().startswith("."):
        return False
    following = paragraph[end.end() : end.end() + 20].lstrip(" \t\n\"'(*_\u201c\u2018")[:1]
    if capitals and following.islower():
        return True
    left = max(0, end.start() - 20)  # Looking back to the line's start would cost a whole line for each full stop.
    before = paragraph[left : end.start()]
    last = before.split()[-1].strip("\"'(*_").casefold() if before and not before[-1].isspace() else ""
    if last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i"):
        return True
    _, line_break, line = before.rpartition("\n")
    return bool(line_break or left == 0) and line.strip(" \t*_#-").isdigit()


INSTRUCTIONS = (
    Instruction("length_constraints:number_words", has_words, {"num_words": count, "relation": relation}),
    Instruction("length_constraints:number_sentences", has_sentences, {"num_sentences": count, "relation": relation}),
    Instruction("length_constraints:number_paragraphs", has_paragraphs, {"num_paragraphs": positive}),
    Instruction(
        "length_constraints:nth_paragraph_first_word",
        starts_paragraph,
        {"num_paragraphs": positive, "nth_paragraph": positive, "first_word": text},
    ),
    # IFTrain
    Instruction("paragraphs:paragraphs", has_two_parts),
    Instruction("paragraphs:paragraphs2", has_two_paragraphs),
)

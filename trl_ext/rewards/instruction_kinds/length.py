"""Test instructions about length: words, sentences, paragraphs."""

import re

from trl_ext.rewards.instruction_kinds.spec import Bound, count, divided, instruction, positive, relation, text
from trl_ext.rewards.instruction_kinds.splitting import sentences
from trl_ext.rewards.text.prose import words

_RUN = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n(?:[ \t\r\f\v]*\n)+")


@instruction("length_constraints:number_words", num_words=count, relation=relation)
def has_words(response: str, num_words: int, relation: Bound) -> bool:
    """True when there are as many words as the relation to `num_words` asks."""
    return relation.holds(count_words(response), num_words)


@instruction("length_constraints:number_sentences", num_sentences=count, relation=relation)
def has_sentences(response: str, num_sentences: int, relation: Bound) -> bool:
    """True when there are as many sentences as the relation to `num_sentences` asks."""
    return relation.holds(count_sentences(response), num_sentences)


@instruction("length_constraints:number_paragraphs", num_paragraphs=positive)
def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """True when `***` divides the response into that many parts, none of them blank."""
    parts = divided(response, "***")
    return len(parts) == num_paragraphs and all(parts)


@instruction(
    "length_constraints:nth_paragraph_first_word", num_paragraphs=positive, nth_paragraph=positive, first_word=text
)
def starts_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True when blank lines divide the response into that many paragraphs and the n-th starts with the word."""
    paragraphs = [part for part in _BLANK_LINES.split(response.strip()) if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    start = paragraphs[nth_paragraph - 1].lstrip(" \t\n*_#>\"'\u201c\u2018(").casefold()
    word = first_word.casefold()
    return start.startswith(word) and not start[len(word) : len(word) + 1].isalnum()


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
    parts = (sentences(part) for part in _BLANK_LINES.split(response))
    return sum(_RUN.search(sentence) is not None for part in parts for sentence in part)

"""Test IFEval's 25 kinds of instructions: words, length, content, form, and the language of the response."""

import re
import string
from functools import lru_cache
from typing import Any

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.instruction_kinds.spec import (
    Relation,
    count,
    divided,
    instruction,
    letter,
    positive,
    relation,
    sentences,
    text,
    texts,
)
from trl_ext.rewards.rules.json_schema import MAX_DEPTH, nesting, strict_json
from trl_ext.rewards.rules.language import Language
from trl_ext.rewards.text.prose import count_word, unmarked, words

# "WELL-KNOWN" and "U.S." are one word each, "I'm" is two: its "I" is a word of capitals.
_WORD = re.compile(r"\w++(?>(?:[.-]\w++)*)")
_RUN = re.compile(r"\w+")
BLANK_LINES = re.compile(r"\n(?:[ \t\r\f\v]*\n)+")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
_QUOTES = {'"': '"', "\u201c": "\u201d"}
# Allowed around a phrase at the end: quotation marks that another instruction asks for, and emphasis.
_WRAPPING = ' \t\n"\u201c\u201d*_'
_BULLET = re.compile(r"^[ \t]*+[*+-][ \t]++(?=[^\n]*\w)", re.MULTILINE)
# Asterisks on both sides, without spaces inside: "2 * 3 * 4" highlights nothing.
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])[^\n*]++(?<!\s)\1(?!\*)")
_TITLE = re.compile(r"<<([^<>\n]+)>>")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)
# The paper's options; the rows of its data set name none.
_OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


@instruction("keywords:existence", keywords=texts)
def has_keywords(response: str, keywords: tuple[str, ...]) -> bool:
    """Return True if all keywords occur, in any case and inside longer words too: "tornado" is in "tornadoes"."""
    folded = response.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


@instruction("keywords:frequency", keyword=text, frequency=count, relation=relation)
def has_keyword_often(response: str, keyword: str, frequency: int, relation: Relation) -> bool:
    """Return True if the keyword, in any case and inside longer words too, occurs as often as the relation asks.

    Args:
        response: The completion.
        keyword: Text to count.
        frequency: Wanted number of occurrences.
        relation: Compares the count with the wanted number, such as `operator.ge`.
    """
    return relation(response.casefold().count(keyword.casefold()), frequency)


@instruction("keywords:forbidden_words", forbidden_words=texts)
def lacks_words(response: str, forbidden_words: tuple[str, ...]) -> bool:
    """Return True if no forbidden word occurs as a separate word, in any case: "cat" may be in "cathedral"."""
    folded = unmarked(response.casefold())
    return not any(count_word(folded, word.casefold()) for word in forbidden_words)


@instruction("keywords:letter_frequency", letter=letter, let_frequency=count, let_relation=relation)
def has_letter_often(response: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """Return True if the letter, capital or small, occurs as often as the relation asks.

    Args:
        response: The completion.
        letter: Letter to count.
        let_frequency: Wanted number of occurrences.
        let_relation: Compares the count with the wanted number, such as `operator.ge`.
    """
    return let_relation(response.casefold().count(letter.casefold()), let_frequency)


@instruction("change_case:capital_word_frequency", capital_frequency=count, capital_relation=relation)
def has_capital_words(response: str, capital_frequency: int, capital_relation: Relation) -> bool:
    """Return True if the number of words without a small letter, such as "I", meets the relation."""
    num_words = sum(match.group().isupper() for match in _WORD.finditer(response))
    return capital_relation(num_words, capital_frequency)


@instruction("change_case:english_capital")
def is_upper(response: str) -> bool:
    """Return True if there are capitals, no small letter, and most letters are A to Z, so that it can be English."""
    return response.isupper() and _mostly_latin(response)


@instruction("change_case:english_lowercase")
def is_lower(response: str) -> bool:
    """Return True if there are small letters, no capital, and most letters are a to z, so that it can be English."""
    return response.islower() and _mostly_latin(response)


@instruction("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    """Return True without a comma; Arabic and Chinese commas and the low quotation mark count, too."""
    return not any(comma in response for comma in ",\u060c\u3001\u201a")


def _mostly_latin(response: str) -> bool:
    letters = [char for char in response if char.isalpha()]
    return 2 * sum(map(str.isascii, letters)) > len(letters)


@instruction("length_constraints:number_words", num_words=count, relation=relation)
def has_words(response: str, num_words: int, relation: Relation) -> bool:
    """Return True if the number of words has the relation to `num_words`."""
    return relation(count_words(response), num_words)


@instruction("length_constraints:number_sentences", num_sentences=count, relation=relation)
def has_sentences(response: str, num_sentences: int, relation: Relation) -> bool:
    """Return True if the number of sentences has the relation to `num_sentences`."""
    return relation(count_sentences(response), num_sentences)


@instruction("length_constraints:number_paragraphs", num_paragraphs=positive)
def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Return True if `***` divides the response into that many parts, none of them blank."""
    parts = divided(response, "***")
    return len(parts) == num_paragraphs and all(parts)


@instruction(
    "length_constraints:nth_paragraph_first_word", num_paragraphs=positive, nth_paragraph=positive, first_word=text
)
def starts_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return True if blank lines divide the response into that many paragraphs and the n-th starts with the word.

    Args:
        response: The completion.
        num_paragraphs: Paragraphs that it must have.
        nth_paragraph: Number of the paragraph, from 1.
        first_word: Word with which it must start, in any case.
    """
    paragraphs = [part for part in BLANK_LINES.split(response.strip()) if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    start = paragraphs[nth_paragraph - 1].lstrip(" \t\n*_#>\"'\u201c\u2018(").casefold()
    word = first_word.casefold()
    return start.startswith(word) and not start[len(word) : len(word) + 1].isalnum()


def count_words(response: str) -> int:
    """Count runs of letters, digits and "_": "don't" is two; in scripts without spaces, count characters.

    Example:
        >>> count_words("I don't - do you?"), count_words("做数学")
        (5, 3)
    """
    return sum(len(words(run)) for run in _RUN.findall(response))


def count_sentences(response: str) -> int:
    """Count sentences: parts with a letter or digit that end in `.`, `!`, `?` or others, at a blank line or the end.

    A full stop after an abbreviation, an initial or a number that opens a line ("1.") is no end, nor before a small
    letter if the text has capitals.

    Example:
        >>> count_sentences("Dr. Ada paid $3.50. Why? (She had to.)")
        3
    """
    parts = (sentences(part) for part in BLANK_LINES.split(response))
    return sum(_RUN.search(sentence) is not None for part in parts for sentence in part)


@instruction("detectable_content:postscript", postscript_marker=text)
def has_postscript(response: str, postscript_marker: str) -> bool:
    """Return True if a line starts with the marker, in any case and spacing, and a text follows."""
    rest = response.casefold()
    marker = r"[^\S\n]*".join(map(re.escape, "".join(postscript_marker.casefold().split())))
    ends = [match.end() for match in re.finditer(rf"^(?:[^\S\n]|[*_#>])*{marker}", rest, re.MULTILINE)]
    return bool(ends) and bool(rest[ends[-1] :].strip(_WRAPPING + ".:"))


@instruction("detectable_content:number_placeholders", num_placeholders=count)
def has_placeholders(response: str, num_placeholders: int) -> bool:
    """Return True if at least that many square brackets hold something on one line."""
    return sum(bool(inside.strip()) for inside in _PLACEHOLDER.findall(response)) >= num_placeholders


@instruction("combination:repeat_prompt", prompt_to_repeat=text)
def repeats_prompt(response: str, prompt_to_repeat: str) -> bool:
    """Return True if the response starts with the prompt, in any case and spacing, and an answer follows."""
    prompt = " ".join(prompt_to_repeat.casefold().split())
    spoken = " ".join(response.casefold().split())
    return spoken.startswith(prompt) and len(spoken) > len(prompt)


@instruction("combination:two_responses")
def has_two_responses(response: str) -> bool:
    """Return True if `******` divides the response into two different ones."""
    parts = divided(response, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def phrase(value: Any) -> str:
    """Read a string that is more than quotation marks and emphasis."""
    bare = text(value).strip(_WRAPPING)
    if not bare:
        raise ValueError("a phrase")
    return bare


@instruction("startend:end_checker", end_phrase=phrase)
def ends_with(response: str, end_phrase: str) -> bool:
    """Return True if the response ends with the phrase, in any case; quotation marks and emphasis may follow."""
    return response.casefold().strip(_WRAPPING).endswith(end_phrase.casefold())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """Return True if double quotation marks, straight or curly, open and close the response with something between."""
    response = response.strip()
    closing = _QUOTES.get(response[:1])
    return closing is not None and response[1:].endswith(closing) and bool(response[1:-1].strip())


@instruction("detectable_format:number_bullet_lists", num_bullets=count)
def has_bullets(response: str, num_bullets: int) -> bool:
    """Return True if exactly that many lines start with `*`, `-` or `+`, a space and a text."""
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:number_highlighted_sections", num_highlights=count)
def has_highlights(response: str, num_highlights: int) -> bool:
    """Return True if at least that many parts of lines are between one, two or three asterisks."""
    return len(_HIGHLIGHT.findall(response)) >= num_highlights


@instruction("detectable_format:multiple_sections", section_spliter=text, num_sections=positive)
def has_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """Return True for at least that many sections: a line that starts with mark and number (2 or II), then text."""
    mark = re.escape(section_spliter)
    heading = re.compile(rf"^[ \t#*_]*{mark}[ \t]*(?:\d+|[IVXLC]+)\b", re.MULTILINE)
    parts = heading.split(response)[1:]
    return sum(any(map(str.isalnum, part)) for part in parts) >= num_sections


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    """Return True if the whole response, or all of it inside one fence, is a JSON object or list."""
    response = response.strip()
    fenced = _FENCE.fullmatch(response)
    response = fenced[1] if fenced else response
    if nesting(response) > MAX_DEPTH:
        return False
    try:
        return isinstance(strict_json(response), dict | list)
    except ValueError:
        return False


@instruction("detectable_format:title")
def has_title(response: str) -> bool:
    """Return True if a line holds text between `<<` and `>>`."""
    return any(inside.strip() for inside in _TITLE.findall(response))


@instruction("detectable_format:constrained_response")
def is_one_option(response: str) -> bool:
    """Return True if exactly one of "My answer is yes.", "... no." and "... maybe." occurs, in any case."""
    folded = response.casefold()
    return sum(option in folded for option in _OPTIONS) == 1


def choices(value: Any) -> tuple[str, ...]:
    """Read a list of options, or a text of options divided by `/`."""
    return texts(value.strip("()").split("/") if isinstance(value, str) else value)


@instruction("validate_choice", options=choices)
def is_choice(response: str, options: tuple[str, ...]) -> bool:
    """Return True if the response is one of the options, in any case and with any marks around (RLVR-IFeval)."""
    marks = string.whitespace + string.punctuation
    return response.casefold().strip(marks) in {option.casefold().strip(marks) for option in options}


@lru_cache(maxsize=64)
def language(code: Any) -> Language:
    """Return the rule for a language code; ValueError if the code is unknown, or needs a missing package."""
    try:
        return Language(code)
    except (RuleError, SupportError) as error:
        raise ValueError(f"a language that can be recognised here: {error}") from error


@instruction("language:response_language", language=language)
def is_in_language(response: str, language: Language) -> bool:
    """Return True if nine tenths of the prose, outside code and formulas, are in the language."""
    return language.score(Row(None, response, None, {})).value == 1.0

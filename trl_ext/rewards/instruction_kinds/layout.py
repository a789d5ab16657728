"""Test instructions about layout: lists, lines, quotation marks, brackets, emojis, title case; IFBench's."""

import re
from itertools import pairwise
from typing import Any

import regex

from trl_ext.rewards.instruction_kinds.spec import instruction, text
from trl_ext.rewards.instruction_kinds.splitting import bare_words, sentences, word_tokens

_EMOJI = regex.compile(r"[\p{Extended_Pictographic}\p{Emoji_Modifier}\p{Regional_Indicator}\u20e3]")
_MARKS = re.compile(r"[\s!-/:-@\[-`{-~]+")
_CLOSERS = {")": "(", "]": "[", "}": "{"}
_MIN_BRACKETS, _MIN_QUOTES = 5, 3
_BULLET = re.compile(r"^[ \t]*+\*(?!\*)[ \t]*+(?=[^\n]*\w)", re.MULTILINE)
_SUB_BULLET = re.compile(r"^[ \t]*+-[ \t]*+(?=[^\n]*\w)", re.MULTILINE)
_THESIS = re.compile(r"<(i|em)>([^<]*+)</\1>", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]++"')
_CHOICE = re.compile(r"\W*a\W+b\W+c\b.*", re.IGNORECASE)
# Words that stay small in a title: articles, conjunctions and short prepositions.
_MINOR = frozenset("a an and as at but by for from if in into nor of off on or so the to up via vs with yet".split())


@instruction("format:parentheses")
def has_deep_brackets(response: str) -> bool:
    """True when brackets `( [ {` are nested five deep and the innermost are closed; a wrong closer starts anew."""
    opened: list[str] = []
    for char in response:
        if char in "([{":
            opened.append(char)
        elif char in _CLOSERS:
            if not opened or opened[-1] != _CLOSERS[char]:
                opened.clear()
            elif len(opened) >= _MIN_BRACKETS:
                return True
            else:
                opened.pop()
    return False


@instruction("format:quotes")
def has_deep_quotes(response: str) -> bool:
    """True when quotation marks `"` and `'` take turns three deep and all three are closed."""
    opened: list[str] = []
    deepest = 0
    for char in response.translate(_STRAIGHT):
        if opened and char == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= _MIN_QUOTES:
                return True
        elif char in "\"'":
            opened.append(char)
            deepest = max(deepest, len(opened))
    return False


_STRAIGHT = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


def options(value: Any) -> tuple[tuple[str, ...], bool]:
    """Read options divided by `/`, "or" or commas, and whether they are letters, which are compared as written."""
    given = text(value)
    mark = "/" if "/" in given else "or" if re.search(r"\bor\b", given) else ","
    parts = re.split(r"\bor\b", given) if mark == "or" else given.split(mark)
    return tuple(part.strip() for part in parts if part.strip()), _CHOICE.fullmatch(given) is not None


@instruction("format:options", options=options)
def is_option(response: str, options: tuple[tuple[str, ...], bool]) -> bool:
    """True when the response is one of the options; unless they are letters, case and marks around do not count."""
    named, letters = options
    if letters:
        return response.strip() in named
    return _bare(response) in map(_bare, named)


def _bare(text: str) -> str:
    return text.casefold().strip(" \t\n!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


@instruction("format:newline")
def has_a_word_a_line(response: str) -> bool:
    """True when no line holds more than one word."""
    return all(len(bare_words(line)) < 2 for line in response.split("\n"))


@instruction("format:emoji")
def ends_with_emojis(response: str) -> bool:
    """True when each sentence ends with an emoji, before its full stop or behind it."""
    found = sentences(response)
    bare = [_MARKS.sub("", sentence) for sentence in found]
    following = [*bare, ""][1:]
    return all(
        not one or _EMOJI.search(one[-2:]) or _EMOJI.match(then) for one, then in zip(bare, following, strict=True)
    ) and any(bare)


@instruction("format:line_indent")
def is_stairs(response: str) -> bool:
    """True when each of two or more lines is indented further than the line before."""
    lines = [line for line in response.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return len(lines) > 1 and all(left < right for left, right in pairwise(indents))


@instruction("format:quote_unquote")
def explains_quotes(response: str) -> bool:
    """True when a text follows each phrase in double quotation marks, and there is one at least."""
    found = _QUOTED.split(response.translate(_STRAIGHT))
    return len(found) > 1 and all(any(char.isalnum() for char in part) for part in found[1:])


@instruction("format:list", sep=text)
def has_list(response: str, sep: str) -> bool:
    """True when the mark occurs at least twice."""
    return response.count(sep) >= 2


@instruction("format:thesis")
def has_thesis(response: str) -> bool:
    """True when there is a text in `<i>` or `<em>`, and more text behind it."""
    found = _THESIS.search(response)
    return found is not None and bool(found[2].strip()) and bool(response[found.end() :].strip())


@instruction("format:sub-bullets")
def has_sub_bullets(response: str) -> bool:
    """True for lines that start with `*`, each followed by one that starts with `-` before the next."""
    parts = _BULLET.split(response)
    return len(parts) > 1 and all(_SUB_BULLET.search(part) for part in parts[1:])


@instruction("format:no_bullets_bullets")
def has_sentences_then_bullets(response: str) -> bool:
    """True for two sentences at least and then two lines that start with `*` at least, and nothing behind them."""
    start = _BULLET.search(response)
    if start is None or len(sentences(response[: start.start()])) < 2:
        return False
    lines = [line for line in response[start.start() :].split("\n") if line.strip()]
    return len(lines) >= 2 and all(line.lstrip().startswith("*") for line in lines)


@instruction("format:title_case")
def is_title_case(response: str) -> bool:
    """True when each word starts with a capital, small words such as "of" inside aside."""
    found = [word for word in word_tokens(response) if word[0].isalpha()]
    return bool(found) and all(
        not word[0].islower() or (place > 0 and word in _MINOR) or (not word[1:].islower() and len(word) > 1)
        for place, word in enumerate(found)
    )


@instruction("format:output_template")
def fits_template(response: str) -> bool:
    """True when `My Answer:`, `My Conclusion:` and `Future Outlook:` occur in this order, each with a text behind."""
    marks = ("My Answer:", "My Conclusion:", "Future Outlook:")
    places = [response.find(mark) for mark in marks]
    if -1 in places or places != sorted(places):
        return False
    ends = [*places[1:], len(response)]
    texts = [response[start + len(mark) : end] for mark, start, end in zip(marks, places, ends, strict=True)]
    return all(any(map(str.isalnum, text)) for text in texts)


@instruction("format:no_whitespace")
def has_no_space(response: str) -> bool:
    """True without white space."""
    return not any(map(str.isspace, response.strip("\n")))

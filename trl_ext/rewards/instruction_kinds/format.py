"""Test instructions about form: bullets, highlights, sections, JSON, title, one of fixed answers."""

import re

from trl_ext.rewards.instruction_kinds.spec import count, instruction, positive, text
from trl_ext.rewards.rules.json_schema import MAX_DEPTH, nesting, strict_json

_BULLET = re.compile(r"^[ \t]*+[*+-][ \t]++(?=[^\n]*\w)", re.MULTILINE)
# Asterisks on both sides, and neither of the inner sides a space: "2 * 3 * 4" highlights nothing.
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])[^\n*]++(?<!\s)\1(?!\*)")
_TITLE = re.compile(r"<<([^<>\n]+)>>")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)
# The options that the paper names; the rows of its data set name none.
_OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


@instruction("detectable_format:number_bullet_lists", num_bullets=count)
def has_bullets(response: str, num_bullets: int) -> bool:
    """True when exactly that many lines start with `*`, `-` or `+`, a space and a text."""
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:number_highlighted_sections", num_highlights=count)
def has_highlights(response: str, num_highlights: int) -> bool:
    """True when at least that many stretches within a line stand between one, two or three asterisks."""
    return len(_HIGHLIGHT.findall(response)) >= num_highlights


@instruction("detectable_format:multiple_sections", section_spliter=text, num_sections=positive)
def has_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """True for at least that many sections: a line that starts with the mark and a number (2 or II), and a text."""
    mark = re.escape(section_spliter)
    heading = re.compile(rf"^[ \t#*_]*{mark}[ \t]*(?:\d+|[IVXLC]+)\b", re.MULTILINE)
    parts = heading.split(response)[1:]
    return sum(any(char.isalnum() for char in part) for part in parts) >= num_sections


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    """True when the whole response, or all of it inside one fence, is a JSON object or list."""
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
    """True when something stands between `<<` and `>>` on one line."""
    return any(inside.strip() for inside in _TITLE.findall(response))


@instruction("detectable_format:constrained_response")
def is_one_option(response: str) -> bool:
    """True when exactly one of "My answer is yes.", "My answer is no.", "My answer is maybe." occurs, in any case."""
    folded = response.casefold()
    return sum(option in folded for option in _OPTIONS) == 1

"""Test instructions about content: postscript, placeholders, a repeated prompt, two answers, start and end."""

import re
from typing import Any

from trl_ext.rewards.instruction_kinds.spec import count, divided, instruction, text

_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
_QUOTES = {'"': '"', "\u201c": "\u201d"}
# May stand around a phrase at the end: quotation marks that another instruction asks for, and emphasis.
_WRAPPING = ' \t\n"\u201c\u201d*_'


@instruction("detectable_content:postscript", postscript_marker=text)
def has_postscript(response: str, postscript_marker: str) -> bool:
    """True when a line starts with the marker, in any case and spacing, and a text follows behind it."""
    rest = response.casefold()
    marker = r"[^\S\n]*".join(map(re.escape, "".join(postscript_marker.casefold().split())))
    ends = [match.end() for match in re.finditer(rf"^(?:[^\S\n]|[*_#>])*{marker}", rest, re.MULTILINE)]
    return bool(ends) and bool(rest[ends[-1] :].strip(_WRAPPING + ".:"))


@instruction("detectable_content:number_placeholders", num_placeholders=count)
def has_placeholders(response: str, num_placeholders: int) -> bool:
    """True when at least that many square brackets hold something on one line."""
    return sum(bool(inside.strip()) for inside in _PLACEHOLDER.findall(response)) >= num_placeholders


@instruction("combination:repeat_prompt", prompt_to_repeat=text)
def repeats_prompt(response: str, prompt_to_repeat: str) -> bool:
    """True when the response starts with the prompt, in any case and spacing, and an answer follows."""
    prompt = " ".join(prompt_to_repeat.casefold().split())
    spoken = " ".join(response.casefold().split())
    return spoken.startswith(prompt) and len(spoken) > len(prompt)


@instruction("combination:two_responses")
def has_two_responses(response: str) -> bool:
    """True when `******` divides the response into two different ones."""
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
    """True when the response ends with the phrase, in any case, and at most quotation marks and emphasis behind it."""
    return response.casefold().strip(_WRAPPING).endswith(end_phrase.casefold())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """True when double quotation marks, straight or curly, open and close the response with something between."""
    response = response.strip()
    closing = _QUOTES.get(response[:1])
    return closing is not None and response[1:].endswith(closing) and bool(response[1:-1].strip())

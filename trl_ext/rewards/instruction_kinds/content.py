"""Instructions about what must be there: postscript, placeholders, a repeated prompt, two answers, start and end."""

import re
from typing import Any

from trl_ext.rewards.instruction_kinds.spec import Instruction, count, text

_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
_QUOTES = {'"': '"', "\u201c": "\u201d"}
# What may stand around a phrase at the end: quotation marks that another instruction asks for, and emphasis.
_WRAPPING = ' \t\n"\u201c\u201d*_'


def has_postscript(response: str, postscript_marker: str) -> bool:
    """A line starts with the marker, in any case and spacing, and a text follows behind it."""
    marker = "".join(postscript_marker.casefold().split())
    rest = response.casefold()
    position = _marked_line(rest, marker)
    return position >= 0 and bool(rest[position:].strip(_WRAPPING + ".:"))


def has_placeholders(response: str, num_placeholders: int) -> bool:
    """At least that many times there is something in square brackets on one line."""
    return sum(bool(inside.strip()) for inside in _PLACEHOLDER.findall(response)) >= num_placeholders


def repeats_prompt(response: str, prompt_to_repeat: str) -> bool:
    """The response starts with the prompt, in any case and spacing, and an answer follows."""
    prompt = " ".join(prompt_to_repeat.casefold().split())
    spoken = " ".join(response.casefold().split())
    return spoken.startswith(prompt) and len(spoken) > len(prompt)


def has_two_responses(response: str) -> bool:
    """`******` divides the response into two different ones; it may also stand before the first and after the last."""
    parts = [part.strip() for part in response.strip().split("******")]
    inner = parts[(not parts[0]) : len(parts) - (not parts[-1])]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def ends_with(response: str, end_phrase: str) -> bool:
    """The phrase, in any case, is the last that is said; only quotation marks and emphasis may close behind it."""
    return response.casefold().strip(_WRAPPING).endswith(end_phrase.casefold())


def phrase(value: Any) -> str:
    """A string that is more than quotation marks and emphasis."""
    bare = text(value).strip(_WRAPPING)
    if not bare:
        raise ValueError("a phrase")
    return bare


def is_quoted(response: str) -> bool:
    """Double quotation marks, straight or curly, stand at the start and at the end with something between."""
    response = response.strip()
    closing = _QUOTES.get(response[:1])
    return closing is not None and response[1:].endswith(closing) and bool(response[1:-1].strip())


def _marked_line(response: str, marker: str) -> int:
    """The position behind the last line start that reads as the marker without its spaces; -1 without one."""
    found = -1
    position = 0
    for line in response.splitlines(keepends=True):
        end = _behind_marker(line, marker)
        if end >= 0:
            found = position + end
        position += len(line)
    return found


def _behind_marker(line: str, marker: str) -> int:
    matched = 0
    for position, char in enumerate(line):
        if char.isspace() or (char in "*_#>" and not matched):
            continue
        if char != marker[matched]:
            return -1
        matched += 1
        if matched == len(marker):
            return position + 1
    return -1


INSTRUCTIONS = (
    Instruction("detectable_content:postscript", has_postscript, {"postscript_marker": text}),
    Instruction("detectable_content:number_placeholders", has_placeholders, {"num_placeholders": count}),
    Instruction("combination:repeat_prompt", repeats_prompt, {"prompt_to_repeat": text}),
    Instruction("combination:two_responses", has_two_responses),
    Instruction("startend:end_checker", ends_with, {"end_phrase": phrase}),
    Instruction("startend:quotation", is_quoted),
)

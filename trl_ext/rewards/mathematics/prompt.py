"""Detect an answer that stands in the prompt as it is: a task given back instead of solved."""

import re
from functools import lru_cache
from typing import Any

_MAX_PROMPT_CHARS = 50_000
_OPERATOR = re.compile(r"[-+*/^=!<>_]|\\[A-Za-z]|[0-9)][A-Za-z(]|[\u221a\u00b7\u00d7\u00f7\u2264\u2265]")
_SQUEEZED = re.compile(r"\s|\\left|\\right|\\[,;!]|[${}]|\\(?=[dt]frac)|(?<=\\)[dt](?=frac)")


def stands_in(answer: str, prompt: Any) -> bool:
    """Return True when the prompt holds the answer, and the answer is more than a number, a name or one sign."""
    bare = answer.strip().lstrip("-+")
    if len(bare) < 3 or not _OPERATOR.search(bare):
        return False
    return _squeezed(bare) in _squeezed_prompt(_text(prompt))


def _text(prompt: Any) -> str:
    """A prompt in either of TRL's shapes as text."""
    if isinstance(prompt, str):
        return prompt[:_MAX_PROMPT_CHARS]
    if not isinstance(prompt, list | tuple):
        return ""
    contents = [message.get("content") for message in prompt if isinstance(message, dict)]
    return "\n".join(_content(content) for content in contents)[:_MAX_PROMPT_CHARS]


def _content(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


@lru_cache(maxsize=256)  # The completions of a group share their prompt.
def _squeezed_prompt(text: str) -> str:
    return _squeezed(text)


def _squeezed(text: str) -> str:
    return _SQUEEZED.sub("", text)

"""Read the prompt of a task: whether it contains an answer, and which form of answer it asks for."""

import re
from functools import lru_cache
from typing import Any

_MAX_PROMPT_CHARS = 50_000
_OPERATOR = re.compile(r"[-+*/^=!<>_]|\\[A-Za-z]|[0-9)][A-Za-z(]|[\u221a\u00b7\u00d7\u00f7\u2264\u2265]")
_SQUEEZED = re.compile(r"\s|\\left|\\right|\\[,;!]|[${}]|\\(?=[dt]frac)|(?<=\\)[dt](?=frac)")

_BEGIN = r"(?:^|[.:;,!?)]\s{0,3}|\n|\b(?:please|fully|completely|and|then|to)\s)\s{0,3}"
# Forms of an answer and the words that ask for them: a verb that opens a clause, or the form's name.
FORMS = {
    "factored": re.compile(
        rf"{_BEGIN}factor(?:i[sz]e)?\b(?!\s(?:of|is|in|that|tree)\b)|\bfactored form\b|\bfactori[sz]ation\b"
    ),
    "expanded": re.compile(rf"{_BEGIN}(?:expand|multiply out)\b|\bexpanded form\b"),
    "simplified": re.compile(
        rf"{_BEGIN}simplify\b|\bsimpl(?:est|ified)\b|\blowest terms\b|\breduced (?:form|fraction)\b"
    ),
    "rationalized": re.compile(r"\brationali[sz]e\b"),
    "a fraction": re.compile(r"\b(?:as|form of) an? (?:\w+ ){0,2}fraction\b"),
    "a decimal": re.compile(r"\b(?:as a|in) (?:\w+ )?decimal\b"),
    "a mixed number": re.compile(r"\bas a mixed (?:number|fraction)\b"),
    "in scientific notation": re.compile(r"\bscientific notation\b"),
}

# Every prompt that asks for a form contains one of these, and few others do.
_ANY_FORM = re.compile("factor|expand|multiply|simpl|lowest|reduced|rationali|fraction|decimal|mixed|scientific")


def asked_forms(prompt: Any) -> frozenset[str]:
    """Return the keys of FORMS that the prompt, or the last question of a conversation, asks for."""
    return _asked(question_text(prompt))


@lru_cache(maxsize=256)  # The completions of a group share their prompt.
def _asked(text: str) -> frozenset[str]:
    lower = text.lower()
    if not _ANY_FORM.search(lower):
        return frozenset()
    return frozenset(form for form, words in FORMS.items() if words.search(lower))


def stands_in(answer: str, prompt: Any) -> bool:
    """Return True if the prompt holds the answer, and the answer is more than a number, a name or a sign."""
    bare = answer.strip().lstrip("+")
    if len(bare) < 3 or not _OPERATOR.search(bare):
        return False
    return _squeezed(bare) in _squeezed(_text(prompt))


def question_text(prompt: Any) -> str:
    """Return the text of a prompt in TRL's shapes: a string, or the last user message of a list."""
    if isinstance(prompt, list | tuple):
        messages = [message for message in prompt if isinstance(message, dict) and message.get("role") == "user"]
        return _text(messages[-1:])
    return _text(prompt)


def _text(prompt: Any) -> str:
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
def _squeezed(text: str) -> str:
    return _SQUEEZED.sub("", text)

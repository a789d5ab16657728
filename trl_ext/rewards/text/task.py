"""Read a task: the accepted answers in its gold column's cell, and the form of answer that its prompt asks for."""

import re
from collections.abc import Iterable
from functools import lru_cache
from numbers import Number
from typing import Any

from trl_ext.rewards.base.rule import Verdict
from trl_ext.rewards.text.prose import plain_signs

_MIXED = re.compile(r"(-?[0-9]{1,30})\s?\(([0-9]{1,30})/([0-9]{1,30})\)")
_IN_BRACKETS = re.compile(r"\((-?[0-9./\s]{1,60})\)")
_UNIT = re.compile(r"(-?[0-9][0-9.,/]{0,60})\s?\((?!mod)([A-Za-z][A-Za-z /.'-]{1,40})\)")


def without_brackets(text: str) -> str:
    """Return a gold column's mixed number `4(4/5)`, `(1/10)` or `9 (apples)` as LaTeX; other texts unchanged.

    Example:
        >>> without_brackets("4(4/5)"), without_brackets("(1/10)"), without_brackets("f(2)")
        ('4\\\\frac{4}{5}', '1/10', 'f(2)')
    """
    if (bare := text.strip()).endswith(")"):
        if found := _MIXED.fullmatch(bare):
            return f"{found[1]}\\frac{{{found[2]}}}{{{found[3]}}}"
        if found := _IN_BRACKETS.fullmatch(bare):
            return found[1]
        if found := _UNIT.fullmatch(bare):
            return f"{found[1]} \\text{{{found[2]}}}"
    return text


def golds_of(cell: Any) -> list[str] | None:
    """Return the accepted answers of a gold cell as texts in plain signs, each once; None if the cell holds no answer.

    A text or a number is one answer. Each entry of a list is an accepted answer, except null, NaN and blank entries.

    Example:
        >>> golds_of("4"), golds_of(["NYC", "New York", None]), golds_of({"a": 1})
        (['4'], ['NYC', 'New York'], None)
    """
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(cell, list | tuple):
        return [plain_signs(str(cell))] if _is_answer(cell) else None
    found = (plain_signs(str(entry)) for entry in cell if _is_answer(entry))
    return list(dict.fromkeys(entry for entry in found if entry.strip())) or None


def _is_answer(cell: Any) -> bool:
    return isinstance(cell, str | Number) and not isinstance(cell, bool) and cell == cell


def best(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the best of one answer's verdicts, one per accepted gold; stop at a 1.0.

    A verdict of 1.0 is the best, then "undecided": the answer may equal a gold that cannot be compared. A gold that
    cannot be read counts only if no gold can.
    """
    found = None
    for verdict in verdicts:
        if verdict.value is not None and verdict.value >= 1.0:
            return verdict
        if found is None or _rank(verdict) > _rank(found):
            found = verdict
    assert found is not None, "there is at least one gold"
    return found


def _rank(verdict: Verdict) -> tuple[int, float]:
    if verdict.value is not None:
        return 1, verdict.value
    return (2 if verdict.status == "undecided" else 0), 0.0


# The prompt ----------------------------------------------------------------------------------------------------------

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

r"""Find the place where a text states its answer.

Five anchors announce one: `\boxed{...}`, `<answer>...</answer>`, `####`, a line that starts with `A:`, and the phrases
"answer is" and "answer:" (in Chinese too). The one that comes last in the text decides, whichever it is: a model may
correct itself, and it earns nothing by giving several answers. An anchor without an answer behind it is no answer, and
neither is one with a denial before it ("I do not think that the answer is 3").

Every search takes time linear in the text, whatever it holds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Number
from typing import Any

from trl_ext.rewards.text.boxes import boxes

_PHRASES = ("answer is", "answer:", "answer**:", "答案是", "答案为", "答案:", "答案\uff1a")

# Words that turn the answer beside them into its opposite, or into something else.
DENIAL = (
    r"(?:\b(?:not|never|neither|nor|cannot|no\ longer|except|wrong|incorrect|false|untrue|unlikely|opposite"
    r"|anything\ but|all\ but|(?:other|rather)\ than|instead\ of)\b"
    r"|n['\u2019]t\b|\u2260|(?<![\d!)}])!=|\\neq?\b|不是|不等于|并非|没有|除了)"
)
_DENIED = re.compile(
    DENIAL + r"(?:[^\S\n]+(?!(?:is|are|was|were|equals|becomes)\b)[\w']+){0,4}(?:[^\S\n]|[$*(\[:\\])*+\Z",
    re.IGNORECASE,
)
DENIAL_CHARS = 100  # before an answer, where a denial is looked for

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
# A quoted value may hold ">". None may hold "<", so that no search runs on into the next tag.
_ATTRIBUTES = re.compile(r"""<(/?[A-Za-z][\w-]*+)\s(?>(?:"[^"<]*+"|'[^'<]*+'|[^<>])*)>""")


@dataclass(frozen=True, slots=True)
class Anchored:
    """An announced answer: the anchor that announces it, and its text (empty where the anchor is denied)."""

    anchor: str
    content: str

    @property
    def encloses(self) -> bool:
        """True when the anchor marks where its content ends, as a box or a tag does."""
        return self.anchor in ("\\boxed", "<answer>")

    @property
    def conflict(self) -> "AnswerReading | None":
        """The verdict on a box or tag that holds another one; None where it holds one answer."""
        if not self.encloses or ("\\boxed" not in self.content and "</answer>" not in self.content):
            return None
        return AnswerReading(None, "conflict", f"'{self.anchor}' holds another one: '{self.content[:60]}'")


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The answer in a text: the value to compare (None without one), a Verdict's status, and a line for people."""

    value: object
    status: str
    detail: str


def gold_text(cell: Any) -> str | None:
    """Return a gold column's cell as text; None for a cell that is neither text nor a number, and for NaN."""
    is_value = isinstance(cell, str | Number) and not isinstance(cell, bool) and cell == cell
    return str(cell) if is_value else None


def after_think(text: str) -> str:
    """Return the text behind the last `</think>`: all of it without think tags, "" while `<think>` is still open."""
    _, closer, after = text.rpartition("</think>")
    if closer:
        return after
    return "" if "<think>" in text else after


def visible(text: str) -> str:
    """Remove HTML comments, and everything in a tag but its name.

    Example:
        >>> visible('<answer value="42"></answer><!-- 42 -->')
        '<answer></answer>'
    """
    return _ATTRIBUTES.sub(r"<\1>", _COMMENT.sub("", text)) if "<" in text else text


def denied(text: str, end: int) -> bool:
    """Return True when the words before `end` deny what follows: "It is not", "anything but", "I don't think that"."""
    return _DENIED.search(text[max(0, end - DENIAL_CHARS) : max(0, end)]) is not None


def anchored(text: str, kind: str) -> Anchored | None:
    """Return the announced answer that comes last; None where nothing announces one.

    Args:
        text: The completion, or a gold column.
        kind: "number" passes over a `####` without a number behind it (a Markdown heading); "choice" passes over
            an `A:` with more than a letter behind it (the first option of a list).
    """
    start, anchor = max(_starts(text, kind), default=(-1, ""))
    if start < 0:
        return None
    if denied(text, start - len(anchor) - (anchor == "\\boxed")):  # One more for the brace.
        return Anchored(anchor, "")
    if anchor == "\\boxed":
        return Anchored(anchor, (boxes(text) or [""])[-1])
    if anchor == "<answer>":  # Up to the last closer: one that comes earlier may belong to a tag in a tag.
        content, closer, rest = text[start:].rpartition("</answer>")
        return Anchored(anchor, (content if closer else rest).strip())
    return Anchored(anchor, text[start:].lstrip().partition("\n")[0].strip())


def _starts(text: str, kind: str) -> Iterator[tuple[int, str]]:
    """Yield, for each anchor that occurs, where the content behind its last occurrence starts; -1 for most others."""
    lowered = text.lower()
    if len(lowered) != len(text):  # A few letters grow when lowered, which would shift all positions.
        lowered = text
    for phrase in _PHRASES:
        yield _behind(lowered, phrase), phrase
    yield _behind(text, "\\boxed{"), "\\boxed"
    yield _behind(text, "<answer>"), "<answer>"
    hashes = _behind(text, "####")
    head = text[hashes : hashes + 20].lstrip().lstrip("*$\\({-+\u2212\u20ac\u00a3\u00a5. ") if hashes >= 0 else ""
    if kind != "number" or head[:1].isdigit() or head.startswith(("frac", "dfrac", "tfrac")):
        yield hashes, "####"
    line = max(_behind(text, mark) for mark in ("\nA:", "\n A:", "\n**A:"))
    if line < 0 and text.lstrip("* \n").startswith("A:"):
        line = text.index("A:") + len("A:")
    if kind != "choice" or len(text[line:].lstrip().partition("\n")[0].strip(" ()[]*.")) == 1:
        yield line, "A:"


def _behind(text: str, mark: str) -> int:
    """Return the position behind the last occurrence of a mark; -1 without one."""
    start = text.rfind(mark)
    return start + len(mark) if start >= 0 else -1

r"""Where a text states its answer.

Five anchors announce one: `\boxed{...}`, `<answer>...</answer>`, `####`, a line that starts with `A:`, and the phrases
"answer is" and "answer:" (in Chinese too). The one that comes last in the text decides, whichever it is: a model may
correct itself, and it earns nothing by giving several answers. An anchor without an answer behind it is no answer.

All searches run backwards from the end with `str.rfind`, so the cost is linear in the text whatever it holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_PHRASES = ("answer is", "answer:", "answer**:", "答案是", "答案为", "答案:", "答案\uff1a")


@dataclass(frozen=True, slots=True)
class Anchored:
    """An announced answer: which anchor, and the text that it announces."""

    anchor: str
    content: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text gives as its answer: the value to compare (None without one), a status, and a line for people."""

    value: object
    status: str
    detail: str


def after_think(text: str) -> str:
    """The text behind the last `</think>`; all of it without think tags; nothing while `<think>` is still open."""
    _, closer, after = text.rpartition("</think>")
    if closer:
        return after
    return "" if "<think>" in text else after


def anchored(text: str, kind: str) -> Anchored | None:
    """The announced answer that comes last, or None where nothing announces one.

    Args:
        text: The completion, or a gold column.
        kind: "number" passes over a `####` without a number behind it (a Markdown heading); "choice" passes over
            an `A:` with more than a letter behind it (the first option of a list).
    """
    start, anchor = max(_starts(text, kind), default=(-1, ""))
    if start < 0:
        return None
    if anchor == "\\boxed":
        return Anchored(anchor, braced(text, start))
    if anchor == "<answer>":
        return Anchored(anchor, text[start:].partition("</answer>")[0].strip())
    return Anchored(anchor, text[start:].lstrip().partition("\n")[0].strip())


def braced(text: str, start: int) -> str:
    """The text from `start` to the brace that closes it; empty where none does.

    Example:
        >>> braced(r"\\boxed{\\frac{1}{2}} m", 7)
        '\\\\frac{1}{2}'
    """
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[start:position].strip()
    return ""


def _starts(text: str, kind: str) -> Iterator[tuple[int, str]]:
    """Where the content behind the last occurrence of each anchor starts."""
    lowered = text.lower()
    if len(lowered) != len(text):  # A few letters grow when lowered, and then positions no longer agree.
        lowered = text
    for phrase in _PHRASES:
        yield _behind(lowered, phrase), phrase
    yield _behind(text, "\\boxed{"), "\\boxed"
    yield _behind(text, "<answer>"), "<answer>"
    hashes = _behind(text, "####")
    if hashes >= 0 and (kind != "number" or _starts_number(text, hashes)):
        yield hashes, "####"
    line = _line_start(text)
    if line >= 0 and (kind != "choice" or _is_letter(text, line)):
        yield line, "A:"


def _behind(text: str, mark: str) -> int:
    start = text.rfind(mark)
    return start + len(mark) if start >= 0 else -1


def _starts_number(text: str, start: int) -> bool:
    head = text[start : start + 20].lstrip().lstrip("*$\\({-+\u2212\u20ac\u00a3\u00a5. ")
    return head[:1].isdigit() or head.startswith(("frac", "dfrac", "tfrac"))


def _is_letter(text: str, start: int) -> bool:
    return len(text[start:].lstrip().partition("\n")[0].strip(" ()[]*.")) == 1


def _line_start(text: str) -> int:
    """Behind the last `A:` that opens a line, Markdown emphasis aside; -1 without one."""
    start = max(_behind(text, mark) for mark in ("\nA:", "\n A:", "\n**A:"))
    if start < 0 and text.lstrip("* \n").startswith("A:"):
        return text.index("A:") + len("A:")
    return start

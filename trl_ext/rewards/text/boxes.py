r"""Read the contents of `\boxed{...}` and of `<answer>...</answer>`, in one pass over the text whatever it holds."""

import re

MAX_NESTED = 3  # levels of boxes in boxes that are read: each costs a pass over the text

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}(?:(?P<open>\{)|(?P<bare>-?[0-9.]{1,99}(?![0-9.])))|\\[\\{}]|[{}]")
_ALL_BOXED = re.compile(r"[\s$]*\\(?:boxed|fbox)\s*\{.*\}[\s$]*", re.DOTALL)


def boxes(text: str) -> list[str] | None:
    """Return the contents of all outermost boxes; None where the text has no box.

    A box that holds nothing but a box has that one's content. A box that is never closed gives [""]: the completion
    was cut off.
    """
    found = _outermost(text)
    return None if found is None else [_unboxed(content) for content in found]


def _outermost(text: str) -> list[str] | None:
    """Return the contents of the boxes outside all others as they stand, [""] for an open one, None without any."""
    start = min((place for place in (text.find("\\boxed"), text.find("\\fbox")) if place >= 0), default=-1)
    if start < 0:
        return None
    found: list[str] = []
    opened: list[int] = []  # For each open brace the position behind it if it opens a box, else -1.
    num_open_boxes = 0
    for match in _BOX.finditer(text, start):
        if match["bare"] and not num_open_boxes:
            found.append(match["bare"])
        elif match["open"]:
            opened.append(match.end())
            num_open_boxes += 1
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == "}" and opened:
            begun = opened.pop()
            num_open_boxes -= begun >= 0
            if begun >= 0 and not num_open_boxes:
                found.append(text[begun : match.start()].strip())
    if num_open_boxes:
        return [""]
    return found or None


def answer_tags(text: str) -> list[str] | None:
    """Return the contents of all `<answer>` pairs; [""] for one not closed or in another, None without any."""
    parts = text.split("<answer>")[1:]
    if not parts:
        return None
    if "</answer>" not in parts[-1] or any(part.count("</answer>") > 1 for part in parts):
        return [""]
    return [part.partition("</answer>")[0].strip() for part in parts if "</answer>" in part]


def _unboxed(content: str) -> str:
    """Remove from a box's content the boxes that stand around all of it."""
    for _ in range(MAX_NESTED):
        inner = _outermost(content)
        if inner is None or len(inner) != 1 or not _ALL_BOXED.fullmatch(content):
            break
        content = inner[0]
    return content

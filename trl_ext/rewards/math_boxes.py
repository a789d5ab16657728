r"""The contents of `\boxed{...}` and of `<answer>...</answer>`, in one pass over the text whatever it holds."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}(?:(?P<open>\{)|(?P<bare>-?[0-9.]{1,99}(?![0-9.])))|\\[\\{}]|[{}]")


def boxes(text: str) -> list[str] | None:
    """The contents of all outermost boxes, innermost text of nested ones; None where the text has no box at all.

    A box that is never closed gives [""]: the completion was cut off.
    """
    start = min((place for place in (text.find("\\boxed"), text.find("\\fbox")) if place >= 0), default=-1)
    if start < 0:
        return None
    found: list[str] = []
    opened: list[int] = []  # Where each open brace began: behind the brace for a box, -1 for any other.
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
    return [_unboxed(content) for content in found] or None


def answer_tags(text: str) -> list[str] | None:
    """The contents of all `<answer>` pairs; [""] where the last one is not closed, None without any."""
    parts = text.split("<answer>")[1:]
    if not parts:
        return None
    if "</answer>" not in parts[-1]:
        return [""]
    return [part.partition("</answer>")[0].strip() for part in parts if "</answer>" in part]


def _unboxed(content: str) -> str:
    """A box within a box says the same as the box."""
    inner = boxes(content)
    if (
        inner is not None
        and len(inner) == 1
        and re.fullmatch(r"[\s$]*\\(?:boxed|fbox)\s*\{.*\}[\s$]*", content, re.DOTALL)
    ):
        return inner[0]
    return content

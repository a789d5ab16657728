r"""Read the contents of `\boxed{...}`, `<answer>...</answer>` and {"answer": ...}, in one pass over a text."""

import json
import re
from dataclasses import dataclass

MAX_NESTED = 3  # levels of nested boxes that are read: each costs a pass over the text

_BOX = re.compile(
    r"\\(?:boxed|fbox)\s{0,9}(?:(?P<open>\{)|(?P<bare>-?[0-9.]{1,99}(?![0-9.])))|\\[{}]|\\\\(?!boxed|fbox)|[{}]"
)
_ALL_BOXED = re.compile(r"[\s$]*\\(?:boxed|fbox)\s*\{.*\}[\s$]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Enclosed:
    """The contents of all boxes, or of all answer tags, of a text.

    `contents` is empty if a box or tag is never closed: the completion was cut off. `start` and `end` are the position
    of the last box or tag; `is_nested` is True if one of them holds another and more text.
    """

    anchor: str
    contents: tuple[str, ...]
    start: int
    end: int
    is_nested: bool = False


def boxes(text: str) -> Enclosed | None:
    """Return the outermost boxes; a box that only holds a box gets the inner content; None without a box."""
    found = _outermost(text)
    if found is None:
        return None
    contents, start, end = found
    if any("\\boxed" in content for content in contents):
        for place, content in enumerate(contents):  # Removes boxes around the whole content.
            for _ in range(MAX_NESTED):
                inner = _outermost(content)
                if inner is None or len(inner[0]) != 1 or not _ALL_BOXED.fullmatch(content):
                    break
                contents[place] = content = inner[0][0]
    return Enclosed("\\boxed", tuple(contents), start, end, any("\\boxed" in content for content in contents))


def _outermost(text: str) -> tuple[list[str], int, int] | None:
    """Return the contents of the outermost boxes, unchanged, and the start and end of the last box."""
    first = min((place for place in (text.find("\\boxed"), text.find("\\fbox")) if place >= 0), default=-1)
    if first < 0:
        return None
    found: list[str] = []
    start = end = -1
    opened: list[tuple[int, int]] = []  # Of each open brace: start of the box, start of its content; -1 if no box.
    num_open_boxes = 0
    for match in _BOX.finditer(text, first):
        if match["bare"] and not num_open_boxes:
            found.append(match["bare"])
            start, end = match.span()
        elif match["open"]:
            opened.append((match.start(), match.end()))
            num_open_boxes += 1
        elif match[0] == "{":
            opened.append((-1, -1))
        elif match[0] == "}" and opened:
            begun, content = opened.pop()
            num_open_boxes -= begun >= 0
            if begun >= 0 and not num_open_boxes:
                found.append(text[content : match.start()].strip())
                start, end = begun, match.end()
    if num_open_boxes:
        return [], text.rfind("\\boxed"), len(text)
    return (found, start, end) if found else None


def answer_tags(text: str) -> Enclosed | None:
    """Return all `<answer>` pairs, without contents if a pair is nested or open; else a JSON object's answer."""
    start = text.rfind("<answer>")
    if start < 0:
        return _json_answer(text) if '"' in text else None
    parts = text.split("<answer>")[1:]
    is_nested = any(part.count("</answer>") > 1 for part in parts)
    if is_nested or "</answer>" not in parts[-1]:
        return Enclosed("<answer>", (), start, len(text), is_nested)
    contents = tuple(part.partition("</answer>")[0].strip() for part in parts if "</answer>" in part)
    return Enclosed("<answer>", contents, start, text.rfind("</answer>") + len("</answer>"))


def _json_answer(text: str) -> Enclosed | None:
    """Return "answer", "final_answer" or "choice" of the JSON object at the end of a text or of its last fence."""
    body = (text if text.rstrip().endswith("}") else text.rpartition("```")[0]).rstrip()
    start = body.rfind("\n{") + 1
    if not body.startswith("{", start):
        return None
    try:  # Numbers keep their spelling.
        pairs = json.loads(body[start:], object_pairs_hook=tuple, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    found = tuple(v.strip() for k, v in pairs if k in ("answer", "final_answer", "choice") and isinstance(v, str))
    return Enclosed("JSON", found, start, len(body)) if found else None

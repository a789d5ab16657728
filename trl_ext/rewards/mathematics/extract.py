r"""Find the answer that a completion states.

The first of these kinds that occurs decides: `\boxed{...}`, `<answer>...</answer>`, an announcement (`####`,
"the answer is", "answer:", a line with `A:`; the one that comes last), the whole text where it is one expression, the
last formula of the last line, the last number. Thoughts, HTML and LaTeX comments and the attributes of tags are not
read, and neither is an announcement that the words before it deny.

Every search is one pass over the text.
"""

import re
from dataclasses import dataclass

from trl_ext.rewards.mathematics.bounds import MAX_CHARS, TooComplex, Unreadable
from trl_ext.rewards.mathematics.evaluate import value_of
from trl_ext.rewards.mathematics.tokens import tokenize
from trl_ext.rewards.text.anchors import DENIAL, DENIAL_CHARS, after_think, denied, visible
from trl_ext.rewards.text.boxes import answer_tags, boxes
from trl_ext.rewards.text.numbers import CALCULATOR, read_number

MAX_DIFFERENT = 16  # boxes that are compared with one another
_TAIL_CHARS = 20_000  # at the end of a text, where the last number is looked for

_COMMENT_LINE = re.compile(r"^[ \t]{0,9}%.{0,9999}$", re.MULTILINE)
_ANNOUNCED = re.compile(
    r"answer(?:\*\*)?(?:\s{1,3}is\b|\*{0,2}\s?[:\uff1a])|####|^[ *>]{0,4}A:|答案(?:是|为|[:\uff1a])",
    re.IGNORECASE | re.MULTILINE,
)
_FORMULA = re.compile(
    r"\$\$([^$]{1,4000})\$\$|\$([^$\n]{1,4000})\$|\\\((.{1,4000}?)\\\)|\\\[(.{1,4000}?)\\\]", re.DOTALL
)
# Narrower than `denied`: "the number that is not prime is \boxed{9}" is an answer.
_BOX_DENIED = re.compile(
    r"(?:\b(?:not|never|neither|nor|anything\ but)|n['\u2019]t"
    r"|(?:\bnot|n['\u2019]t)\s(?:think|believe|say|mean|claim|sure)\b[^.\n]{0,40}"
    r"|(?:\bnot|n['\u2019]t)\b[^.\n]{0,40}\banswer\sis)[\s$*(\[:\\]*\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(rf"\W{{0,9}}(?:is|was)\s{{1,3}}{DENIAL}", re.IGNORECASE)
_DENIED_AT_ONCE = re.compile(rf"(?:n['\u2019]t\b|{DENIAL})", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z}])")
_TEXT_GROUP = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s{0,3}\{[^{}]{0,99}\}")
_NAME = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){0,2}")  # a name, a direction, yes or no
_OPTION = re.compile(r"\(?[A-E][).:](?:\s|$)")
_SMALL_WORD = re.compile(r"(?<![\\{A-Za-z])(?:so|is|it|we|to|of|no|be|as|by|an|he|if)(?![A-Za-z}])", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[^\s.])\.(?:\s|$)")
_ANOTHER = re.compile(r"\s{0,3}(?:,|;|or\b|and\b|or else\b|/)\s{0,3}[$\\(0-9-]")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answers that a completion states (one, or several equally valid boxes) and how they were announced.

    `answers` is empty unless `status`, one of a Verdict's, is "ok"; `detail` is a line for people.
    """

    answers: tuple[str, ...]
    anchor: str
    status: str = "ok"
    detail: str = ""


def extract(text: str, where: str, multiple: str) -> Extracted:
    """Find the answer of a completion.

    Args:
        where: "after_think" or "all".
        multiple: How to read several different boxes or answer tags: "reject" is a conflict, "last" takes the last
            one, "all_equal" takes all, and each must be right.
    """
    text = text if where == "all" else outside_thoughts(text)
    if "<<" in text:
        text = CALCULATOR.sub("", text)
    text = visible(text)
    if "%" in text:
        text = _COMMENT_LINE.sub("", text)
    if not text.strip():
        return Extracted((), "", "no_answer", "no text outside thoughts and comments")
    stated = announced(text, multiple)
    return stated if stated is not None else _unannounced(text)


def announced(text: str, multiple: str, trusted: bool = False) -> Extracted | None:
    """Find the boxed, tagged or announced answer; None where the text has none of these.

    A denial before it ("I do not think that the answer is") counts unless the text is `trusted`, as a gold is.
    """
    for anchor, found in (("\\boxed", boxes(text)), ("<answer>", answer_tags(text))):
        if found is not None:
            before = text[: text.rfind(anchor)][-DENIAL_CHARS:]
            is_denied = not trusted and _BOX_DENIED.search(before) is not None
            return _denied(anchor) if is_denied else _one_of(found, anchor, multiple)
    last = max(_ANNOUNCED.finditer(text), key=re.Match.end, default=None)
    if last is None:
        return None
    anchor = last[0].strip(" *>\n")
    is_denied = not trusted and _is_denied(text, last.start())
    return _denied(anchor) if is_denied else _from_line(text[last.end() :], anchor)


def _is_denied(text: str, end: int) -> bool:
    """Return True when the words before `end` deny what follows; `2!=` is a factorial and no inequality."""
    before = text[max(0, end - DENIAL_CHARS) : end].replace("!=", "! =")
    return denied(before, len(before))


def outside_thoughts(text: str) -> str:
    """Return the text behind the thoughts; "" while they, or thoughts inside them, are still open."""
    rest = after_think(text)
    return "" if "<think>" in rest or text.count("<think>") > text.count("</think>") else rest


def _denied(anchor: str) -> Extracted:
    return Extracted((), anchor, "no_answer", f"'{anchor}' is denied")


def _one_of(found: list[str], anchor: str, multiple: str) -> Extracted:
    """Choose the answer among the contents of boxes or tags."""
    filled = list(dict.fromkeys(content for content in found if content))
    if not filled:
        return Extracted((), anchor, "no_answer", f"'{anchor}' is empty or not closed")
    if multiple == "last":
        filled = filled[-1:] if found[-1] == "" else [found[-1]]
    if len(filled) > MAX_DIFFERENT:
        return Extracted((), anchor, "conflict", f"{len(filled)} different answers in '{anchor}'")
    if any(len(content) > MAX_CHARS for content in filled):
        return Extracted((), anchor, "too_long", f"'{anchor}' holds more than {MAX_CHARS} characters")
    if anchor == "<answer>":
        # Tags hold prose as often as formulas, so each is read like a line.
        read = [_from_line(content, anchor) for content in filled]
        failed = next((one for one in read if one.status != "ok"), None)
        if failed:
            return failed
        filled = list(dict.fromkeys(one.answers[0] for one in read))
    if multiple == "all_equal" or len({_cheap_value(content) for content in filled}) == 1:
        return Extracted(tuple(filled) if multiple == "all_equal" else (filled[-1],), anchor)
    shown = " and ".join(repr(content[:40]) for content in filled[:3])
    return Extracted((), anchor, "conflict", f"different answers in '{anchor}': {shown}")


def _cheap_value(content: str) -> object:
    """Return a key that is equal for boxes of one value: the exact number, else the tokens, else the text."""
    try:
        tokens = tokenize(content)
    except (Unreadable, TooComplex):
        return content
    try:
        exact = value_of(tokens).exact
    except (Unreadable, TooComplex):
        return tokens
    return tokens if exact is None else exact


def _from_line(rest: str, anchor: str) -> Extracted:
    """Read the answer that follows an announcement."""
    rest = rest[: 4 * MAX_CHARS].lstrip(" \t\r\n:*=\uff1a")
    formula = _FORMULA.match(rest)
    if formula and not _is_prose(_formula_text(formula)):
        if _ANOTHER.match(rest, formula.end()):
            return Extracted((), anchor, "conflict", f"several answers behind '{anchor}'")
        if _DENIED_AFTER.match(rest, formula.end()):
            return _denied(anchor)
        return _checked(_formula_text(formula), anchor)
    line = rest.partition("\n")[0].strip(' *`"')
    line = line if _OPTION.match(line) else _SENTENCE.split(line, maxsplit=1)[0].strip(' *`"')
    if _DENIED_AT_ONCE.match(line):
        return _denied(anchor)
    if line and (not _is_prose(line) or _NAME.fullmatch(line) or _OPTION.match(line)):
        return _checked(line, anchor)
    return _number(f"A: {line}", anchor)


def _is_prose(text: str) -> bool:
    """Return True when words stand outside LaTeX commands."""
    return _WORD.search(_TEXT_GROUP.sub(" ", text)) is not None


def _unannounced(text: str) -> Extracted:
    """Read the whole text, the last formula of the last line, or the last number as the answer."""
    stripped = text.strip().strip("*`").strip()
    if _is_expression(stripped):
        return _checked(stripped.removesuffix("."), "whole text")
    line = text.rstrip()[-2 * MAX_CHARS :].rpartition("\n")[2]
    formulas = list(_FORMULA.finditer(line))
    if formulas and not re.search(r"[0-9]", line[formulas[-1].end() :]) and not _is_prose(_formula_text(formulas[-1])):
        if _is_denied(line, formulas[-1].start()) or _DENIED_AFTER.match(line, formulas[-1].end()):
            return _denied("last formula")
        return _checked(_formula_text(formulas[-1]), "last formula")
    return _number(text[-_TAIL_CHARS:], "last number")


def _is_expression(text: str) -> bool:
    """Return True when a text is one formula with nothing around it."""
    if len(text) > MAX_CHARS or _is_prose(text) or _SMALL_WORD.search(text):
        return False
    formula = _FORMULA.fullmatch(text.removesuffix("."))
    return formula is not None or not re.search(r"\n|\$.*\$|\\\(|\\\[", text)


def _formula_text(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _checked(answer: str, anchor: str) -> Extracted:
    if len(answer) > MAX_CHARS:
        return Extracted((), anchor, "too_long", f"'{anchor}' holds more than {MAX_CHARS} characters")
    if not answer.strip(" $.\\"):
        return Extracted((), anchor, "no_answer", f"nothing behind '{anchor}'")
    return Extracted((answer.strip(),), anchor)


def _number(text: str, anchor: str) -> Extracted:
    """Read a number in prose (see `numbers`)."""
    reading = read_number(text)
    if reading.value is None:
        return Extracted((), anchor, reading.status, reading.detail)
    return Extracted((str(reading.value),), anchor)

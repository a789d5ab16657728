r"""Read the answer of a text for the rule `Math`.

`text.reader` finds where a text states its answer: a formula, an expression, a name of up to three words, an option,
or a number in prose. If it states none, the answer is the whole text if that is one expression, else the last formula
of the last line, else the last number. Every search is one pass over the text.
"""

import re
from functools import lru_cache

from trl_ext.rewards.mathematics.equal import compare
from trl_ext.rewards.mathematics.tokens import MAX_CHARS, TooComplex, Unreadable, check_answer, tokenize
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.denial import denied_before, denied_behind, without_contrast
from trl_ext.rewards.text.numbers import HALF, MULTIPLIER, last_number, stated_number
from trl_ext.rewards.text.phrases import OR
from trl_ext.rewards.text.prose import visible
from trl_ext.rewards.text.reader import FORMULA, AnswerReading, Candidate, behind_verb, find_answer, has_value

MAX_DIFFERENT = 16  # boxes that are compared with one another
_TAIL_CHARS = 20_000  # at the end of a text, searched for the last number

_WORD = re.compile(  # Three letters directly after a brace are a product: `\\frac{1}{6} abc`.
    r"(?<![\\A-Za-z{\x08\x0c])(?:[A-Za-z]{4,}|(?<!\})(?<!\}\s)[A-Za-z]{3})(?![A-Za-z}])|[\xe0-\xf6\u0400-\u04ff\u3040-\ud7af]"
)
_TEXT_GROUP = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s{0,3}\{[^{}]{0,99}\}")
_FUNCTION = re.compile(  # in plain text, before its argument
    r"(?<![\\A-Za-z])(?:sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|log|exp|theta)"
    r"(?=\s?[(^{\[0-9]|\s(?:[a-z]\b|pi\b|theta\b)|\Z)"
)
_NAME = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){0,2}")  # a name, a direction, yes or no
_OPTION = re.compile(r"\(?[A-J][).:](?:\s|$)")
_SMALL_WORD = re.compile(r"(?<![\\{A-Za-z])(?:so|is|it|we|to|of|no|be|as|by|an|he|if)(?![A-Za-z}])", re.IGNORECASE)
_SENTENCE = re.compile(r"\.(?<=[^\s.]\.)(?<!\.[a-z]\.)(?!(?<=\s[A-Z]\.)\s[a-z])(?:\s|$)")  # not after "i.e", "42 E"
_ANOTHER = re.compile(  # after a formula: `or 5`, or another formula that is not its unit
    rf"\s{{0,3}}[(,;]?\s?(?:[,;、/]|or\b|and\b|or else\b|{OR})\s{{0,3}}[$\\(0-9-]|\s{{0,3}}\\text\{{\s?(?:or|and)\b"
    r"|\s{1,3}\$(?!\s?(?:\\(?:text|mathrm|mbox|approx)|[A-Za-z]{1,3}\^))(?=[^$\n]{0,200}[0-9])"
)
_GOES_ON = re.compile(r"\s*(?:[-+*/^\u00d7]\s*[0-9$\\(]|(?:squared|cubed|plus|minus|times)\b|\?)")
_AROUND = ' *`"'  # signs around an answer
_LEAD = re.compile(
    r"\A(?:(?:therefore|thus|then|so|simply|just|exactly|equal to|equals|given by|USD|EUR|GBP|INR|Rs\.?"
    r"|(?-i:[A-J])(?=:[^:]*\Z))[\s,:]+){1,3}",
    re.IGNORECASE,
)
_NEARLY = re.compile(
    r",?\s(?:which\sis|or)\s(?:about|approximately|roughly|around)\s[0-9.]+\Z"
)  # `3 pi, or about 9.42`
_OR = re.compile(r",?\s*\(?\s*\bor\b\s*")
_AND = re.compile(rf"(\\(?:text|mathrm|mbox)\s{{0,3}}\{{[^{{}}]{{0,99}}\}})|\b(?:and|or)\b|(?![ouye]\s){OR}")
_ONE_WORD = re.compile(r"[A-Za-z]{2,30}")


def extract(text: str, where: str, multiple: str, gold_kind: str = "scalar", golds: tuple[str, ...] = ()) -> Candidate:
    """Find the answer that a completion states: one of the gold's own texts, or else what can be read of it.

    Args:
        where: "after_think" or "all".
        multiple: How to read several different boxes or answer tags: "reject" is a conflict unless the gold is a list,
            "list" takes them as the parts of one list, "last" takes the last.
        gold_kind: `Gold.kind`: "letter", "list" or "scalar" (anything else).
        golds: Texts of the gold.
    """
    text = visible(text, where)
    if not text.strip():
        return Candidate("", (), "no_answer", "no text outside thoughts and comments")
    if gold_kind == "letter":
        reading = read_choice(text)
        if reading.status != "no_answer":
            return _from_reading(reading, "letter")
    if gold_kind == "list" and multiple == "reject":
        multiple = "list"
    found = find_answer(text, "maths")
    whole = found or Candidate("whole text", (text,))
    own = _own_text(whole, multiple, golds)
    if own is not None:
        return Candidate(whole.anchor, (own,))
    return _unannounced(text) if found is None else _announced(found, multiple, gold_kind == "list")


def _own_text(found: Candidate, multiple: str, golds: tuple[str, ...]) -> str | None:
    """Return the gold's text if nothing else is announced; after a phrase it may take several lines."""
    said = {*map(_bare, _contents_of(found, multiple))}
    if len(said) > 1:
        return None
    for gold in filter(_bare_gold, golds):
        num_lines = gold.count("\n") + 1
        lines = found.rest.split("\n", num_lines)[:num_lines]
        if _bare_gold(gold) in (*said, _bare("\n".join(lines))):
            return gold
    return None


def _contents_of(found: Candidate, multiple: str) -> tuple[str, ...]:
    return found.contents[-1:] if multiple == "last" else found.contents


def _bare(text: str) -> str:
    """Return a text without what changes no text: dollars of formulas, Markdown's bold, spaces, the full stop."""
    text = " ".join(text.replace("$", " ").split()).rstrip(". ")
    return text.removeprefix("**").removesuffix("**").strip().rstrip(". ")


_bare_gold = lru_cache(maxsize=4096)(_bare)  # The completions of a group share their gold.


def announced_gold(text: str) -> Candidate | None:
    """Return the answer that a gold column announces, several boxes as one list; None if it announces none."""
    found = find_answer(text, "maths", trusted=True)
    return None if found is None else _announced(found, "list", is_list=True)


def _announced(found: Candidate, multiple: str, is_list: bool) -> Candidate:
    """Return the one answer in an announced candidate: of several boxes or tags the equal, the last, or a list."""
    if found.status != "ok":
        return found
    contents = _contents_of(found, multiple)
    if len(contents) > MAX_DIFFERENT:
        return found.without_answer("conflict", f"holds {len(contents)} different answers")
    read = [_from_content(content, found, is_list) for content in contents]
    failed = next((one for one in read if one.status != "ok"), None)
    if failed:
        return failed
    filled = [*dict.fromkeys(one.contents[0] for one in read)]
    if all(_equal(filled[-1], one) for one in filled[:-1]):
        return Candidate(found.anchor, (filled[-1],))
    if multiple == "list":
        return Candidate(found.anchor, (", ".join(content.strip("$ ") for content in filled),))
    shown = " and ".join(repr(content[:40]) for content in filled[:3])
    return found.without_answer("conflict", f"holds different answers: {shown}")


def _from_content(content: str, found: Candidate, is_list: bool) -> Candidate:
    """Return the answer in a box as it is; tags and phrases hold prose as often as formulas."""
    is_box = found.anchor == "\\boxed"
    return _checked(content, found.anchor) if is_box else _from_line(content, found.anchor, found.encloses, is_list)


def _equal(left: str, right: str) -> bool:
    """Return True if each of two answers is right when the other is the gold."""
    try:
        tokens = tokenize(left), tokenize(right)
        for one in tokens:
            check_answer(one)
        return bool(compare(*tokens).same and compare(*reversed(tokens)).same)
    except (Unreadable, TooComplex, RecursionError):
        return False


def _from_line(rest: str, anchor: str, encloses: bool, is_list: bool) -> Candidate:
    """Read the answer after an announcement: "1 and 2" if the gold is a list, "1/2 or 0.5" if not.

    Args:
        rest: The text from the end of the announcement on.
        anchor: The announcement.
        encloses: Whether the announcement encloses its answer, as a tag does, so that `rest` has nothing else.
        is_list: Whether the gold is a list.
    """
    rest, line = _begin(rest, encloses)
    sentence = _SENTENCE.split(line, maxsplit=1)[0].strip(_AROUND)
    together = _in_one(sentence, is_list)
    if together is not None:
        return _checked(together, anchor)
    formula = FORMULA.match(rest)
    if formula and not _is_prose(_formula_text(formula)) and not MULTIPLIER.match(rest, formula.end()):
        return _from_formula(rest, formula, anchor)
    whole = line if encloses or _OPTION.match(line) else sentence.strip(_AROUND + "\u3002")
    line = _NEARLY.split(whole, maxsplit=1)[0]
    if _is_answer(line):
        return _checked(line, anchor)
    return _from_reading(stated_number(Candidate(anchor, (rest,))), anchor)


def _from_reading(reading: AnswerReading, anchor: str) -> Candidate:
    contents = () if reading.value is None else (str(reading.value),)
    return Candidate(anchor, contents, reading.status, reading.detail)


def _begin(rest: str, encloses: bool) -> tuple[str, str]:
    """Return a text from its answer on, without words such as "therefore", and the line of the answer."""
    rest = _LEAD.sub("", rest, count=1).lstrip(" *:")
    is_prose = _is_prose(rest) or _SMALL_WORD.search(rest) is not None
    if is_prose and not has_value(rest, "maths"):
        rest = behind_verb(rest, "maths") or rest
    return rest, (rest if encloses and not is_prose else rest.partition("\n")[0]).strip(_AROUND)


def _in_one(sentence: str, is_list: bool) -> str | None:
    """Return "1, 2" for "1 and 2" if the gold is a list, 1/2 for "1/2 or 0.5"; None for anything else."""
    parts = _AND.sub(lambda match: match[1] or ",", sentence.replace("$", " ")) if is_list else ""
    if parts and not _is_prose(parts):
        return parts
    first, *others = _OR.split(sentence, maxsplit=2)
    is_same = len(others) == 1 and _equal(first.strip("$ "), others[0].strip("$ )."))
    return first if is_same else None


def _from_formula(rest: str, formula: re.Match[str], anchor: str) -> Candidate:
    """Return the formula that follows an announcement, unless another answer or a denial follows it."""
    found = _checked(_formula_text(formula), anchor)
    if _ANOTHER.match(rest, formula.end()):
        return found.without_answer("conflict", "holds several answers")
    if denied_behind(rest, formula.end()) or _GOES_ON.match(rest, formula.end()):
        return found.without_answer("no_answer", "is denied, or goes on")
    return found


def _is_answer(line: str) -> bool:
    """Return True if a line is an expression, a name or an option, and not a sentence or "half ..."."""
    if not line or HALF.match(line):
        return False
    return not _is_prose(line) or _NAME.fullmatch(line) is not None or _OPTION.match(line) is not None


def _is_prose(text: str) -> bool:
    """Return True if there are words outside LaTeX commands."""
    return _WORD.search(_FUNCTION.sub(" ", _TEXT_GROUP.sub(" ", text.strip(" .")))) is not None


def _unannounced(text: str) -> Candidate:
    """Read the whole text, the last formula of the last line, or the last number as the answer."""
    stripped = text.strip().strip("*`\u2705 ").removeprefix("= ").removeprefix("=")
    if _is_expression(stripped) or _ONE_WORD.fullmatch(stripped):
        return _checked(stripped.removesuffix("."), "whole text")
    line = without_contrast(text.rstrip()[-2 * MAX_CHARS :].rpartition("\n")[2])
    display = _last_display(text)
    if display is not None and not _is_prose(display):
        return _checked(display, "last formula")
    formulas = list(FORMULA.finditer(line))
    if formulas and not re.search(r"[0-9]", line[formulas[-1].end() :]) and not _is_prose(_formula_text(formulas[-1])):
        if denied_before(line, formulas[-1].start()) or denied_behind(line, formulas[-1].end()):
            return Candidate("last formula", (), "no_answer", "the last formula is denied")
        if not MULTIPLIER.match(line, formulas[-1].end()):
            return _checked(_formula_text(formulas[-1]), "last formula")
    reading = last_number(text[-_TAIL_CHARS:])
    if reading.value is None:
        return Candidate("last number", (), reading.status, reading.detail)
    return Candidate("last number", (str(reading.value),))


def _last_display(text: str) -> str | None:
    r"""Return the formula at the end of a text, on separate lines between `\[` and `\]` or `$$` and `$$`."""
    text = text.rstrip(" .\n")
    for opener, closer in (("\\[", "\\]"), ("$$", "$$")):
        if text.endswith("\n" + closer):
            start = text.rfind(opener, 0, -len(closer))
            content = text[start + len(opener) : -len(closer)].strip()
            return None if start < 0 or len(content) > MAX_CHARS else content.removesuffix(".")
    return None


def _is_expression(text: str) -> bool:
    """Return True if a text is one formula with nothing around it."""
    formula = FORMULA.fullmatch(text.removesuffix(".")) if len(text) <= MAX_CHARS else None
    if formula is not None and _NAME.fullmatch(_formula_text(formula)):
        return True
    if len(text) > MAX_CHARS or _is_prose(text) or _SMALL_WORD.search(text):
        return False
    return formula is not None or not re.search(r"\n|\$.*\$|\\\(|\\\[", text)


def _formula_text(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _checked(answer: str, anchor: str) -> Candidate:
    if len(answer) > MAX_CHARS:
        return Candidate(anchor, (), "too_long", f"'{anchor}' holds more than {MAX_CHARS} characters")
    if not answer.strip(" $.\\"):
        return Candidate(anchor, (), "no_answer", f"nothing after '{anchor}'")
    return Candidate(anchor, (answer.strip(),))

"""Find parts of a text in any script: outside thoughts, words, prose, and what boxes and answer tags enclose.

Every function takes time linear in the text. The rules about text read at most MAX_CHARS characters, so their time is
bounded.
"""

import json
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import regex

from trl_ext.rewards.base.rule import Rule, Verdict

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_COMMENT_LINE = re.compile(r"^[ \t]{0,9}%.{0,9999}$", re.MULTILINE)  # of LaTeX
CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's notes: <<48/2=24>>24
# A quoted value may hold ">" but not "<", so that no search continues into the next tag.
_ATTRIBUTES = re.compile(r"""<(/?[A-Za-z][\w-]*+)\s(?>(?:"[^"<]*+"|'[^'<]*+'|[^<>])*)>""")


def after_think(text: str) -> str:
    """Return the text after the last `</think>`: all of it without think tags, "" while `<think>` is open."""
    _, closer, after = text.rpartition("</think>")
    if closer:
        return after
    return "" if "<think>" in text else after


def visible(text: str, where: str) -> str:
    """Return the text to search for an answer in plain signs, without comments, GSM8K's notes and attributes of tags.

    Args:
        where: "all", or "after_think" for the text after the thoughts; that is "" while thoughts are open.

    Example:
        >>> visible('<think>43</think><answer value="42"></answer><!-- 42 -->', "after_think")
        '<answer></answer>'
    """
    text = plain_signs(text)
    if where != "all" and "think>" in text:
        rest = after_think(text)
        text = "" if "<think>" in rest or text.count("<think>") > text.count("</think>") else rest
    if "<" in text:
        text = _ATTRIBUTES.sub(lambda match: f"<{match[1]}>", _COMMENT.sub("", CALCULATOR.sub("", text)))
    return _COMMENT_LINE.sub("", text) if "%" in text else text


# Longest text, in characters, that the rules about text read: some 60,000 tokens of English. A longer text earns the
# floor with status `too_long`; if it were cut, its rest would not be judged.
MAX_CHARS = 250_000

# Han, kana, Hangul, Thai to Myanmar, Khmer and full-width forms: scripts without spaces between words, or (Hangul)
# with particles attached to the word, so that a keyword's end is not visible.
UNSPACED = (
    "\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\uff66-\uff9f"
)
ONE_UNSPACED = re.compile(f"[{UNSPACED}]")
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
# A neighbour that makes a keyword part of a longer word. `\w` of `regex` includes combining marks, which are vowels in
# Indic scripts; `\w` of `re` does not.
_JOINS = rf"[^\W{UNSPACED}]"

_MARKS = r"[\p{M}\uff9e\uff9f]"  # every character that is a combining mark once it is normalised
_MANY_MARKS = regex.compile(rf"({_MARKS}{{30}}){_MARKS}+")
_INVISIBLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# All characters except common blocks without marks, invisible characters and full-width forms.
_UNUSUAL = re.compile(
    "[^\x00-\xac\xae-\u02ff\u0370-\u0482\u048a-\u0590\u1e00-\u200a\u2010-\u2029\u2030-\u205f\u20a0-\u20bf"
    "\u2190-\u2bff\u3000-\u3029\u3041-\u3096\u30a1-\u30ff\u3400-\u9fff\uac00-\ud7a3]"
)
# Characters that show nothing and are no space for `str.split`, also Braille's blank; and HTML's spaces.
_ENTITY = "&(?:nbsp|ensp|emsp|thinsp|zwn?j|shy|#0{0,9}(?:160|820[1345])|#[xX]0{0,9}(?:[aA]0|200[9bBcCdD]));"
_UNSEEN = regex.compile(rf"(?:[[\p{{C}}\p{{Default_Ignorable_Code_Point}}\u2800]--\s]|{_ENTITY})++", regex.V1)
_BLANK = regex.compile(rf"(?:[\s\p{{C}}\p{{Default_Ignorable_Code_Point}}\u2800]|{_ENTITY})*+")
_EMPHASIS = re.compile(r"[*~`]++|(?<![^\W_])_++|_++(?![^\W_])")
_FULL_WIDTH = re.compile("[\uff01-\uff5e]+")
HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
# Signs of texts with answers, each written in one way. A full-width comma is as wide as a comma and a space; the full
# stop and the comma of lists in Chinese stay.
_ONE_SIGN: dict[int, str | int] = {
    **HALF_WIDTH,
    **dict.fromkeys(map(ord, "\u2018\u2019"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\xab\xbb\u300a\u300b\u3008\u3009\u300c\u300d\u300e\u300f"), '"'),
    **dict.fromkeys(map(ord, "\u3010\u3014\u3016"), "["),
    **dict.fromkeys(map(ord, "\u3011\u3015\u3017"), "]"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u3000"), " "),
    0x2212: "-",
    0xFFE5: "\xa5",
    0xFF0C: ", ",
}

# No form may hold its opening mark, so each form scans a character once: with 100,000 times "\(" each attempt ends at
# the next "\(".
_NOT_PROSE = re.compile(
    r"""
      ```[^`]*+(?>(?:`(?!``)[^`]*+)*)(?:```|\Z)  # a fence without an end: all that follows
    | `[^`\n]++`
    | \$\$[^$]++\$\$
    | \$(?=\S)[^$\n]++(?<!\s)\$(?!\d)                                       # not "$5 and $6"
    | \\\([^\\]*+(?>(?:\\(?![()])[^\\]*+)*)\\\)
    | \\\[[^\\]*+(?>(?:\\(?![][])[^\\]*+)*)\\\]
    | \\begin\{[^{}\n]*+\}[^\\]*+(?>(?:\\(?!begin\b|end\b)[^\\]*+)*)\\end\{[^{}\n]*+\}
    | \\[A-Za-z]++\*?+(?>(?:\{[^{}]*+\})*)                                     # a command outside of any formula
    | https?://\S++
    | </?[A-Za-z][\w-]{0,30}+>                                              # tags such as <think>
    """,
    re.VERBOSE,
)


def words(text: str) -> list[str]:
    """Split a text into words at its spaces; in scripts without spaces each character is a word.

    Example:
        >>> words("use GPT 做数学")
        ['use', 'GPT', '做', '数', '学']
    """
    return _WORD.findall(text) if not text.isascii() and ONE_UNSPACED.search(text) else text.split()


def count_word(text: str, word: str, enough: int | None = None) -> int:
    """Count how often `word`, which may be a phrase, is a separate word in `text`, up to `enough`.

    Example:
        >>> count_word("a cathedral", "cat"), count_word("my cat. Cats.", "cat"), count_word("我喜欢数学", "数学")
        (0, 1, 1)
    """
    if enough == 1:
        return int(_alone(word).search(text) is not None)
    return sum(1 for _ in islice(_alone(word).finditer(text), enough))


@lru_cache(maxsize=1024)
def _alone(word: str) -> Any:
    before, after = rf"(?<!{_JOINS})", rf"(?!{_JOINS})"
    opens, closes = (before if regex.match(_JOINS, word[0]) else ""), (after if regex.match(_JOINS, word[-1]) else "")
    return regex.compile(f"{opens}{regex.escape(word)}{closes}")


def unmarked(text: str) -> str:
    """Return the text without Markdown's emphasis: `*`, `~`, "`", and "_" around words.

    Example:
        >>> unmarked("I _cannot_ use **snake_case**")
        'I cannot use snake_case'
    """
    return _EMPHASIS.sub("", text) if any(mark in text for mark in "*~`_") else text


def normalized(text: str) -> str:
    """Return the text as it looks: NFKC (full-width, ligatures, styled letters) without invisible characters.

    Runs of combining marks are cut to 30, the limit of Unicode's Stream-Safe Text Format, because Python's
    normalisation takes quadratic time on them. A character may become 18; the result is cut at MAX_CHARS.

    Example:
        >>> normalized("\uff27\uff30\uff34 i\u200bdk \ufb01ne")
        'GPT idk fine'
    """
    if text.isascii():
        return text
    if _UNUSUAL.search(text):
        text = _FULL_WIDTH.sub(lambda match: match.group().translate(HALF_WIDTH), text)
    if _UNUSUAL.search(text):
        text = _MANY_MARKS.sub(r"\1", _INVISIBLE.sub("", text))
    return unicodedata.normalize("NFKC", text)[:MAX_CHARS]


# The letter of an option in brackets or quotes of Chinese, Japanese or Korean.
_MARKED = re.compile(
    r"[“\u2018「『《〈【\u3014〖](\s?[A-Z\uff21-\uff3a])(?:\s?[”\u2019」』》〉】\u3015〗]|(?![A-Za-z0-9\uff21-\uff3a]))"
)


def plain_signs(text: str) -> str:
    """Return the text with its full-width forms, brackets, quotes, minus signs and spaces as ASCII.

    Brackets and quotes around one letter are removed.

    Example:
        >>> plain_signs("\u3010\u7b54\u6848\u3011\uff22\uff0c\u22123")
        '[答案]B, -3'
    """
    return text if text.isascii() else _MARKED.sub(itemgetter(1), text).translate(_ONE_SIGN)


def prose(text: str, filler: str = " ") -> str:
    """Replace code, LaTeX, links and tags with `filler`.

    Example:
        >>> prose("So <b>half</b>, $x/2$, of `x` costs $5 and $6.", "_")
        'So _half_, _, of _ costs $5 and $6.'
    """
    return _NOT_PROSE.sub(filler, text) if any(mark in text for mark in "`$\\<:") else text


def text_part(text: str, where: str) -> str:
    """Return the part of a completion that `where` names: "all", or "after_think" (see `after_think`)."""
    return text if where == "all" else after_think(text)


def is_blank(text: str) -> bool:
    """Return True if nothing is visible: only space, also `&nbsp;`, control and invisible characters."""
    return _BLANK.fullmatch(text) is not None


def seen(text: str) -> str:
    """Return the visible characters, with one space for each run of white space.

    Example:
        >>> seen("It\u200b is\u3164  18. &nbsp; \\n")
        'It is 18.'
    """
    return " ".join(_UNSEEN.sub("", text).split())


def refusal(rule: Rule, text: str) -> Verdict | None:
    """Return the rule's floor for a text that is blank or too long to read; None for a text that can be judged."""
    if len(text) > MAX_CHARS:
        return Verdict(rule.floor, "too_long", f"{len(text)} characters, at most {MAX_CHARS} are read")
    if is_blank(text):
        return Verdict(rule.floor, "no_answer", "empty")
    return None


# `\boxed{...}`, `<answer>...</answer>` and {"answer": ...}, in one pass over a text ----------------------------------

MAX_NESTED = 3  # levels of nested boxes that are read: each costs a pass over the text

_BOX = re.compile(
    r"\\(?:boxed|fbox)\s{0,9}(?:(?P<open>\{)|(?P<bare>-?[0-9.]{1,99}(?![0-9.])))|\\[{}]|\\\\(?!boxed|fbox)|(?P<brace>\{)|\}"
)
_BOX_OPENS = re.compile(r"\\boxed|\\fbox")
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
                if inner is None or len(inner.contents) != 1 or not _ALL_BOXED.fullmatch(content):
                    break
                contents[place] = content = inner.contents[0]
    return Enclosed("\\boxed", tuple(contents), start, end, any("\\boxed" in content for content in contents))


class _Boxes(NamedTuple):
    """The contents of the outermost boxes, unchanged, and the start and end of the last box."""

    contents: list[str]
    start: int
    end: int


def _outermost(text: str) -> _Boxes | None:
    """Find the outermost boxes; their contents are left out if the last box is not closed."""
    first = _BOX_OPENS.search(text)
    if first is None:
        return None
    found: list[str] = []
    start = end = -1
    opened: list[re.Match[str]] = []
    num_open_boxes = 0
    for match in _BOX.finditer(text, first.start()):
        if match["bare"] and not num_open_boxes:
            found.append(match["bare"])
            start, end = match.span()
        elif match.lastgroup in ("open", "brace"):
            opened.append(match)
            num_open_boxes += match.lastgroup == "open"
        elif match[0] == "}" and opened:
            opener = opened.pop()
            num_open_boxes -= opener.lastgroup == "open"
            if opener.lastgroup == "open" and not num_open_boxes:
                found.append(text[opener.end() : match.start()].strip())
                start, end = opener.start(), match.end()
    if num_open_boxes:
        return _Boxes([], text.rfind("\\boxed"), len(text))
    return _Boxes(found, start, end) if found else None


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

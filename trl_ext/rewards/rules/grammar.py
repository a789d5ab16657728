"""Judge whether prose is fluent by cheap signs: sentences, brackets, words, punctuation.

None of these signs knows grammar. They tell prose from debris (truncated, mashed, stuttering text), so give the rule
a small weight.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from trl_ext.rewards.rule import Row, Rule, Verdict, check_choice
from trl_ext.rewards.scorer import warn_once
from trl_ext.rewards.text.prose import UNSPACED, prose, refusal, text_part, words

_FILLER = "\ufffc"  # Replaces code and formulas, so that a full stop behind one still ends a sentence.
_DEFECTS_TO_ZERO = 0.1  # defects per word from which on a sign is 0.0

_WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_LONG_WORD = re.compile(r"[^\W_]{5,}")
_LETTER = re.compile(r"[^\W\d_]")
_LISTED = re.compile(r"[#|*>+\u2022-]|\d{1,3}[.)]")
# The first letters of sentences; behind "e.g." and "p. 3" no sentence begins.
_FIRST_LETTERS = re.compile(
    r"[.!?](?:(?<=\w\w\w.)|(?<=\d.))[\"'\u201d\u2019)]{0,3}[^\S\n]{1,3}[\"'\u201c\u2018(]{0,3}([^\W\d_])"
)
_SENTENCE_ENDS = tuple(".!?:;\u2026\u3002\uff01\uff1f\uff1a\uff1b" + _FILLER)
_CLOSERS = "\"'*_`)]}\u201d\u2019\uff09\u3011\u300d\u300f\u300b"
_PAIRS = dict(zip(")]}\u201d\uff09\u3011\u300d\u300f\u300b", "([{\u201c\uff08\u3010\u300c\u300e\u300a", strict=True))
_BRACKETS = re.compile("[" + re.escape("".join(_PAIRS) + "".join(_PAIRS.values())) + "]")
_ENUMERATORS = re.compile(r"(?m)^[^\S\n]{0,8}\w{1,3}\)")
_REPEATED_MARKS = re.compile(r"([!?,.;:\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a])\1+")
_DOUBLED = re.compile(rf"\b(?!had\b|that\b|[\d_])([^\W{UNSPACED}]{{2,30}})[^\S\n]{{1,3}}\1\b", re.IGNORECASE)
_SPACED_MARKS = re.compile(r"[\w)][^\S\n]{1,3}(?:[,\uff0c\u3001\u3002\uff01\uff1f]|\.(?![\w.]))")
_STUTTER = re.compile(r"([^\W\d_])\1{3,}")
_JUNK = re.compile("[\ufffd\ud800-\udfff\ue000-\uf8ff\x00-\x08\x0e-\x1f]+")
_SWITCH = re.compile(r"[^\W\d_](?=\d)|\d(?=[^\W\d_])")
_VOWELLESS = re.compile(r"(?i)[bcdfghjklmnpqrstvwxz]{5,}")
_CLUSTER = re.compile(r"(?i)[bcdfghjklmnpqrstvwxz]{7}")


@dataclass(frozen=True, slots=True)
class Grammar(Rule):
    """Mean of seven signs of fluent prose, each 0.0 to 1.0.

    Code, LaTeX, links and tags are cut out first. A sign with nothing to judge is 1.0, so a text without brackets does
    not gain by adding some:

        starts        share of sentences that do not begin with a small letter
        ends          share of paragraphs of four words and more that end a sentence; list items and headings aside
        balance       share of brackets and quotation marks that find their partner
        words         no tokens that cannot be words: "xkcdq", "a1b2c3", "heeeeey", lone surrogates
        punctuation   no repeated marks: "!!", ",,"; "..." is one mark
        doubled       no word twice in a row: "the the"
        spacing       no space in front of a comma or full stop

    The last four fall linearly to 0.0 at one defect in ten words. A completion without words outside of code and
    formulas earns 0.0 with status `no_answer`.

    Args:
        where: "all" reads the whole completion, "after_think" what follows the last `</think>`.

    Example:
        >>> Grammar().score(Row(None, "so the the answer is 18", None, {})).detail
        'starts 0.00, ends 0.00, doubled 0.00'
    """

    tier: ClassVar[str] = "inline"

    where: str = "all"

    def check(self) -> None:
        check_choice(self, "where", self.where, ("all", "after_think"))
        warn_once(
            (type(self), self.name),
            f"Rule '{self.name}' sees signs of broken text and knows no grammar: well-punctuated nonsense earns 1.0. "
            "For grammar and sense ask the rule judge, or a server by an AsyncRule (docs/reference/judges.md).",
        )

    def score(self, row: Row) -> Verdict:
        refused = refusal(self, row.text)
        if refused:
            return refused
        text = prose(text_part(row.text, self.where), _FILLER)
        num_words = len(_WORD.findall(text))
        if not num_words:
            return Verdict(self.floor, "no_answer", "no words outside of code and formulas")
        values = {name: share(text) for name, share in _SHARES.items()}
        for name, num_defects in _DEFECTS.items():
            values[name] = max(0.0, 1.0 - num_defects(text) / (num_words * _DEFECTS_TO_ZERO))
        low = [f"{name} {value:.2f}" for name, value in values.items() if value < 1.0]
        return Verdict(sum(values.values()) / len(values), "ok", ", ".join(low) or "all signs good")


def paragraphs(text: str) -> list[str]:
    """Split into paragraphs, without list items and headings; a line that opens with a small letter joins the last."""
    groups: list[list[str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if groups and line[0].islower():
            groups[-1].append(line)
        else:
            groups.append([line])
    return [" ".join(group) for group in groups if not _LISTED.match(group[0])]


def starts(text: str) -> float:
    """Return the share of sentences that do not begin with a small letter; scripts without capitals always pass."""
    parts = paragraphs(text)
    letters = [head.group() for head in (_LETTER.search(part[:3]) for part in parts) if head]
    letters += (letter for part in parts for letter in _FIRST_LETTERS.findall(part))
    return 1.0 - sum(map(str.islower, letters)) / len(letters) if letters else 1.0


def ends(text: str) -> float:
    """Return the share of paragraphs of four words and more that end a sentence."""
    long = [paragraph for paragraph in paragraphs(text) if len(words(paragraph)) >= 4]
    good = sum(paragraph.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS) for paragraph in long)
    return good / len(long) if long else 1.0


def balance(text: str) -> float:
    """Return the share of brackets and quotation marks with a partner; `1)` and `a)` that open a line do not count."""
    open_marks: list[str] = []
    marks = _BRACKETS.findall(_ENUMERATORS.sub("", text))
    unmatched = 0
    for mark in marks:
        if mark not in _PAIRS:
            open_marks.append(mark)
        elif open_marks and open_marks[-1] == _PAIRS[mark]:
            open_marks.pop()
        else:
            unmatched += 1
    straight = text.count('"')
    total = len(marks) + straight
    return 1.0 - (unmatched + len(open_marks) + straight % 2) / total if total else 1.0


def is_odd(token: str) -> bool:
    """Return True for a token that cannot be a word; names such as GPT4 and H2O, and all capitals, can.

    Example:
        >>> [is_odd(token) for token in ("strength", "xkcdq", "a1b2c3", "HTTPS", "GPT4")]
        [False, True, True, False, False]
    """
    if len(token) < 5 or token.isdecimal():
        return False
    if len(token) > 40 or len(_SWITCH.findall(token)) > 1:
        return True
    return not token.isupper() and bool(_VOWELLESS.fullmatch(token) or _CLUSTER.search(token))


_SHARES: dict[str, Callable[[str], float]] = {"starts": starts, "ends": ends, "balance": balance}
_DEFECTS: dict[str, Callable[[str], int]] = {
    # Tokens that cannot be words, runs of one letter, and characters that are no text.
    "words": lambda text: (
        sum(map(is_odd, _LONG_WORD.findall(text))) + sum(len(pattern.findall(text)) for pattern in (_STUTTER, _JUNK))
    ),
    "punctuation": lambda text: sum(run.group() != "..." for run in _REPEATED_MARKS.finditer(text)),
    "doubled": lambda text: len(_DOUBLED.findall(text)),  # "had had" and "that that" are English.
    "spacing": lambda text: len(_SPACED_MARKS.findall(text)),  # French puts one in front of the taller marks.
}

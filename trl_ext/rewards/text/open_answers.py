r"""Judge what a text answers to an open question by the accepted answers.

"contains" reads one sentence: of what is announced (see `reader`), or else the text's first that has a word which the
question has not. It must hold an accepted answer's words in any order with at most one word between them. Accents,
case, plurals and articles do not count, nor does "two" for "2"; of a name of three or four words the last and one
other are enough. Not paid is an answer that is denied, and one of several: "A or B", "A, B, C", "A and B" unless both
are golds, B in "A, B" (A is paid: B may be the country in which it lies).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from trl_ext.rewards.rule import Verdict
from trl_ext.rewards.text.denial import denied_before, denied_behind
from trl_ext.rewards.text.golds import golds_of
from trl_ext.rewards.text.prose import UNSPACED
from trl_ext.rewards.text.reader import stated

_MAX_CHARS = 4_000  # of an answer, from its start
_MAX_SENTENCE = 400  # characters
_VERBS = frozenset("is was are were it by but".split())  # of which a sentence has one, and a row of names none
_LOOSE = _VERBS | frozenset(
    "a an the of in on at to from with and for as its his her their be been this some other".split()
)
_TRUTH = frozenset(("yes", "no", "true", "false"))
_CARDINALS = "zero one two three four five six seven eight nine ten eleven twelve"
_ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_NUMBERS = {word: str(value) for row in (_CARDINALS, _ORDINALS) for value, word in enumerate(row.split())}
_WORD = re.compile(rf"[{UNSPACED}]|\d+(?:\.\d+)?\b|[^\W_{UNSPACED}]+")
# The possessive, commas of numbers, "th" of 5th, quotation marks, points of abbreviations (U.S., J. K.).
_DROPPED = re.compile(
    r"['\u2019]s\b|(?<=\d),(?=\d{3}\b)|(?<=\d)(?:st|nd|rd|th|s)\b|[\"\u201c\u201d*]|(?<=\b[A-Za-z])\.\s?(?=[A-Za-z]\b)"
)
_SENTENCE_END = re.compile(r"(?<=[^\s.]{3}[.!?])\s+(?=\W?[A-Z0-9])|\n\s*\n|(?<=\u3002)")
_IDLE = re.compile(r"(?i)\s*(?:as an ai|i'?m sorry|i am sorry|i do not|i don't|sorry|hello)\b|.*[:?]\s*\Z")
_NEGATED = re.compile(
    r"(?i)\b(?:not|never|nor?|neither|cannot|\w+n['\u2019]t|without|except|unlike|nobody|none|than|instead\sof)"
    r"(?:\s(?!but\b)[\w-]+){0,2}\s?\Z"
)
_OPTIONS = re.compile(r"([\w-]{1,40})[\s,]{1,3}or\s(?:(?:a|an|the|in|of)\s)?([\w-]{1,40})")
_NAME = re.compile(r"\b[A-Z0-9][\w'\u2019.-]*")
_LONG_NAME = re.compile(r"(?:[A-Z][\w.'\u2019-]*+(?:\s|\Z)){3,4}")
_CLAUSE_END = re.compile(r"[,;:]\s|\b(?:and|or|but|while|whereas)\s")
_BETWEEN = (  # items of a list
    r"(?:\s?[,;/|&\u2022\u3001]\s?(?:(?:and|or)\s)?|\s?\n[-\s\d.)]*+|\s(?:and|or|vs)\s)"
    r"(?:(?:the|a|an|in|of|also|it|is|maybe|perhaps)\s){0,3}"
)
# By whether the answer is a name or a number: the list that ends before it, and the one that begins behind it.
_LISTS = tuple(
    (re.compile(rf"\b(?>{item}{_BETWEEN})+\Z"), re.compile(rf"\)?(?>{_BETWEEN}{item})+"))
    for item in (
        r"[\w-]++(?:\s(?!(?:and|or|vs)\s)[\w-]++)?",
        r"[A-Z0-9][\w.-]*+(?:\s(?:of\s|the\s)*[A-Z0-9][\w.-]*+)*\)?",
    )
)
_EITHER = re.compile(r"\b(?:or|vs)\b|[/|\n]")
_ONE_OF = re.compile(r"\b(?:and|or|vs)\b|[&;/|\n\u2022\u3001]")


def accepted(cell: Any) -> list[str] | None:
    """Return the accepted answers of a gold cell: a text, a list, or TriviaQA's mapping with `value` and `aliases`.

    Example:
        >>> accepted({"value": "Paris", "aliases": ["Paris, France"]})
        ['Paris', 'Paris, France']
    """
    if isinstance(cell, Mapping):
        cell = [cell.get("value"), *(golds_of(cell.get("aliases")) or ())]
    return golds_of(cell)


def judge_open(text: str, golds: list[str], question: str, match: str) -> Verdict:
    """Return the verdict on a completion: by "contains", "exact" (SQuAD's exact match) or "f1" (of its words)."""
    found = stated(text, "exact")
    if found is not None and found.status != "ok":
        return Verdict(0.0, found.status, found.detail)
    answers = (text,) if found is None else found.contents
    if len({" ".join(_squad(answer)) for answer in answers}) > 1:
        return Verdict(0.0, "conflict", f"several answers, such as {' and '.join(answers[:2])!r:.80}")
    answer = answers[0][:_MAX_CHARS].strip()
    words, rights = _squad(answer), [_squad(gold) for gold in golds]
    if not words:
        return Verdict(0.0, "no_answer", "empty")
    value = float(words in rights)
    if match == "f1":
        value = max(2 * (Counter(words) & Counter(right)).total() / (len(words) + len(right)) for right in rights)
    if match == "contains" and not value:
        return _contains(answer, golds, _folded(question))
    return Verdict(value, "ok", f"{answer!r:.60}; gold {golds[0]!r:.60}")


def _squad(text: str) -> list[str]:
    """Return the words as SQuAD's script compares them: without case, punctuation, articles, here also accents."""
    bare = unicodedata.normalize("NFKD", text).casefold()
    kept = "".join(char for char in bare if char.isalnum() or char.isspace())
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _folded(text: str) -> str:
    bare = unicodedata.normalize("NFKD", text)
    return _DROPPED.sub("", "".join(char for char in bare if not unicodedata.combining(char)))


def _words(text: str) -> list[tuple[str, int, int]]:
    """Return the words of a folded text that are not loose, in the singular, numbers as digits: with start and end."""
    found = []
    for match in _WORD.finditer(text):
        word = match[0].casefold()
        if word not in _LOOSE:
            word = word[:-1] if len(word) > 3 and word[-1] == "s" != word[-2] else word
            found.append((_NUMBERS.get(word, word), match.start(), match.end()))
    return found


def _set(text: str) -> set[str]:
    return {word for word, _, _ in _words(text)}


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their gold.
def _wanted(gold: str) -> list[list[str]]:
    """Return the lists of words of which one must be there: of "A or B" either, of a name the last and one other."""
    folded = _folded(gold)
    wanted = [[word for word, _, _ in _words(part)] for part in (folded, *re.split(r"\sor\s|;", folded))]
    if _LONG_NAME.fullmatch(folded):
        wanted += [[word, wanted[0][-1]] for word in wanted[0][:-1]]
    return [*filter(None, wanted)]


def _contains(answer: str, golds: list[str], asked: str) -> Verdict:
    """Look for the golds in the sentence that is read; the last refusal is kept for where none is found."""
    known, right = _set(asked), {word for gold in golds for word in _set(_folded(gold))}
    parts = [_folded(part).strip() for part in _SENTENCE_END.split(answer) if not _IDLE.match(part)]
    sentence = next((part for part in parts if _set(part) - known), parts[0] if parts else "")
    if len(sentence) > _MAX_SENTENCE:
        return Verdict(0.0, "too_long", f"a sentence of {len(sentence)} characters, at most {_MAX_SENTENCE} are read")
    options = {word for pair in _OPTIONS.findall(asked) for word in _set(" ".join(pair))} - right
    rest, is_row = _set(sentence) - right, _VERBS.isdisjoint(sentence.casefold().split())
    is_row = is_row and rest.isdisjoint(known) and len(rest) > 2 - any(map(str.isdigit, sentence))
    if is_row or _squad(sentence) == _squad(asked):
        return Verdict(0.0, "conflict", f"a row of words, or the question again: {sentence!r:.60}")
    status, detail = "ok", f"{answer!r:.60}; gold {golds[0]!r:.60}"
    for gold, wanted in ((one, words) for one in golds for words in _wanted(one)):
        for start, end in _places(sentence, wanted):
            told, before = sentence[start:end], sentence[:start]
            if told.casefold() in _TRUTH:
                rival = before or " ".join(_set(sentence[end:]) & _TRUTH)
            elif _NEGATED.search(before) or denied_before(sentence, start) or denied_behind(sentence, end):
                status, detail = "no_answer", f"{told!r:.60} is denied"
                continue
            else:  # Of "A or B?" in the question the one that is named first is the answer.
                rival = " ".join(_set(before) & options) if _set(told) <= known else ""
                rival = rival or _rival(sentence, start, end, known - options | right)
            if not rival:
                return Verdict(1.0, "ok", f"{told!r:.60}; gold {gold!r:.60}")
            status, detail = "conflict", f"{told!r:.60} beside {rival!r:.60}"
    return Verdict(0.0, status, detail)


def _places(sentence: str, wanted: list[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each place where all wanted words stand, with at most one other between them."""
    words, bag = _words(sentence), Counter(wanted)
    for first in range(len(words) - len(wanted) + 1):
        for length in (len(wanted), len(wanted) + 1):
            row = words[first : first + length]
            if {row[0][0], row[-1][0]} <= set(bag) and not bag - Counter(word for word, _, _ in row):
                yield row[0][1], row[-1][2]


def _rival(text: str, start: int, end: int, known: set[str]) -> str:
    """Return another answer, of words not `known`, beside the one between `start` and `end`; "" without any."""
    told = text[start:end]
    is_number = any(map(str.isdigit, told))
    is_name = told != told.lower() and not is_number

    def is_rival(part: str) -> bool:
        return bool(_set(part) - known) and any(map(str.isdigit, part)) == is_number

    own, *clauses = sorted(_CLAUSE_END.split(text), key=lambda clause: told not in clause)
    for clause in clauses:  # "Paris is the seat, Rome is the seat"
        if _set(_NAME.sub("", own)) == _set(_NAME.sub("", clause)) != set() and is_rival(clause):
            return clause
    back, ahead = _LISTS[is_name or is_number]
    before, behind = (found[0] if found else "" for found in (back.search(text[:start]), ahead.match(text[end:])))
    earlier, later = ([item for item in re.split(_BETWEEN, part) if is_rival(item)] for part in (before, behind))
    is_list = len(earlier + later) > 1 or (_ONE_OF if is_name else _EITHER).search(before + behind)
    return (earlier + later)[0] if (later and is_list) or (earlier and (is_list or is_name)) else ""

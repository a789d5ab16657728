r"""Judge what a text answers to an open question by the accepted answers.

"contains" reads one sentence: of what is announced (see `reader`), or else of the text, the first that names something
that the question does not. Which one is read follows from the kind of the first gold (name, number or neither), never
from the gold, so that a second guess elsewhere earns nothing. It must hold an accepted answer's words near each other:
accents, case, punctuation, articles and titles do not count, nor do plurals, "two" for "2", the order of "5 March
2024", the middle of a name, what a gold has in brackets. Not paid is a denied answer, and one of several: "A or B",
"A, B and C", "A and B" unless both are golds, B in "A, B" (A is paid: B may be the country in which it lies).
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
_MAX_SENTENCE = 800  # characters
_MAX_NAMES = 12  # in a sentence, besides those of the question and the gold
_NUMBERS = (
    "zero|one first|two second|three third|four fourth|five fifth|six sixth|seven seventh|eight eighth|nine ninth"
    "|ten tenth|eleven eleventh|twelve twelfth|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty"
)
_SAME = {word: str(number) for number, words in enumerate(_NUMBERS.split("|")) for word in words.split()}
_SAME |= {word + "ty": f"{ten}0" for ten, word in enumerate("thir for fif six seven eigh nine".split(), 3)}
_SAME |= {"m": "meter", "metre": "meter", "km": "kilometer", "kilometre": "kilometer", "ft": "foot", "feet": "foot"}
_SAME |= {
    "mile": "mi",
    "u": "america",
    "us": "america",
    "usa": "america",
    "saint": "st",
    "jnr": "jr",
    "ii": "2",
    "iii": "3",
}
_LOOSE = frozenset(
    "a an the of in on at to by from with and or for as its his her their it is was be been are were he she they that"
    " this which who whom sir dame dr mr mrs lord lady king queen prince princess st president emperor jr sr season"
    " year around approximately about circa c if there some however typically after during since".split()
)
_TRUTH = frozenset(("yes", "no", "true", "false"))
_WORD = re.compile(rf"[{UNSPACED}]|\d+(?:\.\d+)?\b|[^\W_{UNSPACED}]+")
_FOLDS = (
    (
        re.compile(
            r"(?<=\d),(?=\d{3}(?!\d))|(?:(?<=\b\d)|(?<=\b\d\d)),(?=\s\d{4}\b)|['\u2019`]s\b|[\"\u201c\u201d*\u2018]"
        ),
        "",
    ),
    (re.compile(r"(?i)\banswer\s?:"), ""),  # of JSON
    (re.compile(r"\b(\d\d)(\d\d)\s?[-\u2013/]\s?(\d\d)\b(?!\s?[-\u2013/])"), r"\1\2 \1\3"),  # 1979-80
    (re.compile(r"(\d)(?:st|nd|rd|th|s)\b"), r"\1"),
    (re.compile(r"(?<=\b[A-Za-z])\.\s?(?=[A-Za-z]\b)|(?<=\w)['\u2019`.](?=[A-Za-z])"), ""),  # U.S., J. K., O'Hara
)
# A mark behind a word of two letters, before a capital. "Dr. Grey", "Jr. High", "J. K." and "U.S. Army" are whole.
_SENTENCE_END = re.compile(
    r"(?:(?<=[a-z0-9)\]'\u2019%]{2}[.!?])|(?<=[A-Za-z0-9)\]%]{2}[.!?][\"\u201d'\u2019)]))(?<!\b[A-Z][a-z]\.)"
    r"(?<!\b[A-Z][a-z][a-z]\.)\s+(?=[\"\u201c('\u2018]?[A-Z0-9])|\n\s*\n|(?<=\u3002)"
)
_IDLE = re.compile(r"\s*(?:as an ai|i'?m sorry|i am sorry|i do not|i don't|sorry|hello)\b|.*[:?]\Z", re.IGNORECASE)
_NAME = re.compile(r"\b[A-Z][\w'\u2019.-]*|\b\d[\d,.]*|\"[^\"]+\"|\u201c[^\u201d]+\u201d")
# Neighbours of an answer in a list: what may come before one, one by itself, and what lies between two.
_BEFORE = r"(?:(?:the|a|an|in|at|of|by|also|even|is|it is|either|maybe|perhaps|possibly|probably)\s){0,3}"
_PROPER = r"[A-Z0-9][\w.-]*+(?:\s(?:(?:of|the|de|la|von|van|del)\s){0,2}[A-Z0-9][\w.-]*+){0,4}"
_COMMON = r"[\w-]++(?:\s(?!(?:and|or|vs)\s)[\w-]++)?"
_BETWEEN = (
    r"(?P<mark>\s?[,;|\u2022\u3001]\s?(?:(?:and|or|and/or)\s)?|\s(?:and|or|&|vs|and/or)\s|\s?/\s?|\s?\n[-*\d.)\s]*+)"
)
_NEXT, _LAST = (
    tuple(re.compile(form.replace("ITEM", item)) for item in (_COMMON, _PROPER))
    for form in (
        rf"\A\)?{_BETWEEN}{_BEFORE}(?P<item>ITEM)(?!\s(?:is|was|has|had|did|were|are|who)\b)",
        rf"\b(?P<item>ITEM){_BETWEEN}{_BEFORE}\Z",
    )
)
_EITHER = re.compile(r"\b(?:or|vs)\b|/")
_ONE_OF = re.compile(r"\b(?:and|or|vs)\b|[&;/|\n\u2022\u3001]")
_SPLITS = re.compile(rf"{_ONE_OF.pattern}|[,:]")
_CLAUSE = re.compile(r"[,;:]\s|\b(?:and|or|but|while|whereas)\s")
_NOT = r"(?:not|never|cannot|(?:is|was|are|were|do|does|did|has|have|had|ca|could|would|should|wo)nt)"
_DENIED = re.compile(
    rf"\b(?:{_NOT}|no(?!\s\d)|nor|neither|without|except|unlike|nobody|none|(?:other|rather)\sthan|instead\sof|false"
    r"|wrong|incorrect)\b(?:\s(?!but\b)[\w-]+){0,4}\s?\Z|\bthan\s\Z",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(rf"\)?(?:,?\s\w+)?,?\s{_NOT}\b", re.IGNORECASE)
_NEGATES = re.compile(rf"\b(?:{_NOT}|no|without|except|none)\b", re.IGNORECASE)


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
    if not _squad(answer):
        return Verdict(0.0, "no_answer", "empty")
    value = max(_f1(_squad(answer), _squad(gold), exact=match != "f1") for gold in golds)
    if match == "contains" and not value:
        return _contains(answer, golds, question)
    return Verdict(value, "ok", f"{answer!r:.60}; gold {golds[0]!r:.60}")


def _squad(text: str) -> list[str]:
    """Return the words as SQuAD's script compares them: without case, punctuation, articles, here also accents."""
    bare = unicodedata.normalize("NFKD", text).casefold()
    kept = "".join(char for char in bare if char.isalnum() or char.isspace())
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(answer: list[str], gold: list[str], exact: bool) -> float:
    shared = sum((Counter(answer) & Counter(gold)).values())
    return float(answer == gold) if exact else 2 * shared / max(1, len(answer) + len(gold))


def _folded(text: str) -> str:
    """Return the text without accents, points of abbreviations, commas of numbers and quotation marks."""
    parts = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text))
    text = "".join(char for char in parts if not unicodedata.combining(char))
    for pattern, by in _FOLDS:
        text = pattern.sub(by, text)
    return text


def _words(text: str) -> list[tuple[str, int, int]]:
    """Return the words of a folded text in one form for plural and singular, digits and names: with start and end."""
    found = []
    for match in _WORD.finditer(text):
        word = match[0].casefold()
        if len(word) > 3 and word[-1] == "s" and word[-2] != "s":
            word = word[:-3] + "y" if word.endswith("ies") else word[:-1]
        found.append((_SAME.get(word, word), match.start(), match.end()))
    return found


def _set(text: str) -> set[str]:
    return {word for word, _, _ in _words(text)}


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their gold.
def _wanted(gold: str) -> tuple[tuple[str, ...], ...]:
    """Return the sets of words of which one must be there: of "A or B" either, of a name the last and one other."""
    bare = re.sub(r"\([^)]*\)|\[[^]]*\]", " ", gold)
    wanted: list[tuple[str, ...]] = []
    for part in dict.fromkeys((bare if bare.strip() else gold, *re.split(r"\s+or\s+|;", bare))):
        folded = _folded(part)
        words = [entry for entry in _words(folded) if entry[0] not in _LOOSE] or _words(folded)
        names = [word for word, start, _ in words if folded[start].isupper()]
        if 3 <= len(names) <= 4 and len(names) == len(words) and not re.search(r"[,&/]|\sand\s", folded):
            wanted += [(name, names[-1]) for name in names[:-1]]
        elif words:
            wanted += [tuple(word for word, _, _ in words), ("".join(word for word, _, _ in words),)]  # "bee keeper"
    return tuple(wanted)


def _kind(text: str) -> str:
    """Return "number" for a text that holds a digit, "name" for one that holds a capital, else ""."""
    return "number" if any(map(str.isdigit, text)) else "name" if text != text.lower() else ""


def _names(text: str) -> list[str]:
    """Return names, numbers and titles; the first word of a longer sentence is in capitals, whatever it is."""
    short = len(text.split()) < 5
    return [match[0] for match in _NAME.finditer(text) if match.start() > 0 or short]


def _sentence(answer: str, kind: str, known: set[str]) -> str:
    """Return the first sentence that holds what is not `known` of the gold's kind."""
    parts = [part.strip() for part in _SENTENCE_END.split(answer) if part and part.strip()]
    parts = [part for part in parts if not _IDLE.match(part)] or parts
    for part in parts if kind else ():
        names = [name for name in _names(part) if (_kind(name) == "number") == (kind == "number")]
        if any(word not in known for name in names for word, _, _ in _words(name)):
            return part
    return parts[0]


def _contains(answer: str, golds: list[str], question: str) -> Verdict:
    """Look for the golds in the sentence that is read; the last refusal is kept for where none is found."""
    asked = _folded(question)
    known, right = _set(asked), set().union(*(_set(_folded(gold)) for gold in golds))
    status, detail = "ok", f"{answer!r:.60}; gold {golds[0]!r:.60}"
    sentence = _folded(_sentence(answer, _kind(golds[0]), known | _LOOSE))
    words = _words(sentence)
    if len(sentence) > _MAX_SENTENCE:
        return Verdict(0.0, "too_long", f"a sentence of {len(sentence)} characters, at most {_MAX_SENTENCE} are read")
    for gold in golds:
        for wanted in _wanted(gold):
            if len(wanted) == 1 and wanted[0] in _TRUTH:
                if words and words[0][0] == wanted[0] and sum(word in _TRUTH for word, _, _ in words) == 1:
                    return Verdict(1.0, "ok", f"{sentence!r:.60}; gold {gold!r:.60}")
                continue
            for start, end in _places(words, wanted):
                told = sentence[start:end]
                splits = known.issuperset(wanted) or (_SPLITS.search(told) and not _SPLITS.search(gold))
                if splits and len(_words(told)) > len(wanted):
                    continue  # "Ann Lee and Bob Ray" is no Ann Ray.
                if _is_denied(sentence, start, end) and not _NEGATES.search(asked):
                    status, detail = "no_answer", f"{told!r:.60} is denied"
                elif other := _other(sentence, start, end, right, asked):
                    status, detail = "conflict", f"{told!r:.60} beside {other!r:.60}"
                else:
                    return Verdict(1.0, "ok", f"{told!r:.60}; gold {gold!r:.60}")
    return Verdict(0.0, status, detail)


def _places(words: list[tuple[str, int, int]], wanted: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each place where all wanted words stand near each other, in any order."""
    spots = [[index for index, (word, _, _) in enumerate(words) if word == want] for want in wanted]
    if all(spots):
        for first in spots[0]:
            near = [first, *(min(spot, key=lambda index: abs(index - first)) for spot in spots[1:])]
            if len(set(near)) == len(near) and max(near) - min(near) <= len(wanted) + 6:
                yield words[min(near)][1], words[max(near)][2]


def _is_denied(text: str, start: int, end: int) -> bool:
    refused = _DENIED.search(text[max(0, start - 60) : start]) or _TAKEN_BACK.match(text, end)
    return refused is not None or denied_before(text, start) or denied_behind(text, end)


def _other(text: str, start: int, end: int, right: set[str], asked: str) -> str:
    """Return another answer of the sentence beside the one between `start` and `end`; "" where that is alone.

    What holds no words but `right`, those of the golds, is right, too. A name of the question is no other answer,
    unless the question is to choose between names.
    """
    told, known = text[start:end], _set(asked)
    must_choose = _EITHER.search(asked) is not None and _set(told) <= known
    is_named, is_number = _kind(told) != "", _kind(told) == "number"

    def is_other(part: str) -> bool:
        words = _set(part) - _LOOSE
        return bool(words) and not words <= right and (must_choose or not words <= known)

    names = [name for part in (text[:start], text[end:]) for name in _names(part) if is_other(name)]
    if len(names) > _MAX_NAMES or (must_choose and any(_set(name) & known for name in names)):
        return names[0]
    rest = _set(text) - right
    if not must_choose and known - _LOOSE <= _set(text) <= known | _LOOSE:
        return asked  # The question again, of which a gold is a part.
    if len(rest) > (1 if is_number else 2) and rest.isdisjoint({"not", "but"} | _LOOSE | known):
        return min(rest)  # of a row of words: "paris london rome madrid"
    # Another clause in the same words: "Paris is the seat, Rome is the seat".
    own, *clauses = sorted(_CLAUSE.split(text), key=lambda clause: told not in clause)
    bare = _set(_NAME.sub(" ", own))
    for clause in clauses:
        words = _set(_NAME.sub(" ", clause))
        if (bare & words) - _LOOSE and len(bare ^ words) < 2 and any(map(is_other, _names(f" {clause}"))):
            return clause
    others, num_right, is_second, marks, near = [], 1, False, "", ""
    for step, part in ((_NEXT, text[end : end + 240]), (_LAST, text[max(0, start - 240) : start])):
        is_first = True
        while match := step[is_named].search(part):
            item, mark = match["item"], match["mark"]
            part = part[match.end() :] if step is _NEXT else part[: match.start()]
            opens = step is _LAST and item.split()[0].casefold() in _LOOSE  # "In the United States, the Senate"
            if not is_other(item):
                num_right += 1
            elif not opens and (_kind(item) == "number") == is_number:
                others.append(item)
                is_second |= step is _LAST and is_named
                near += mark if is_first else ""
            marks, is_first = marks + mark, False
    is_list = len(others) > (2 if is_named else 1) or is_second or (is_named and _ONE_OF.search(marks))
    return others[0] if others and (_EITHER.search(near) or (is_list and 2 * len(others) > num_right)) else ""

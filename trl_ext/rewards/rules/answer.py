"""Compare the answer with a gold column: as a number, a text or a letter."""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_column
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.numbers import CLOCK, read_gold_number, read_number, time_of
from trl_ext.rewards.text.prose import normalized, visible
from trl_ext.rewards.text.reader import AnswerReading, Candidate, find_answer, read_all
from trl_ext.rewards.text.task import best, golds_of

_MAX_CHARS = 4_000  # of an answer, from its start


def accepted(cell: Any) -> list[str] | None:
    """Return the accepted answers of a gold cell: a text, a list, or TriviaQA's mapping with `value` and `aliases`.

    Example:
        >>> accepted({"value": "Paris", "aliases": ["Paris, France"]})
        ['Paris', 'Paris, France']
    """
    if isinstance(cell, Mapping):
        cell = [cell.get("value"), *(golds_of(cell.get("aliases")) or ())]
    return golds_of(cell)


def judge_open(text: str, golds: list[str], match: str) -> Verdict:
    """Return the verdict on a completion by "exact" (SQuAD's exact match) or "f1" (of its words).

    The announced answer is read, or else the whole text: a list of candidates is not exact, so it earns nothing.
    """
    reading = read_all(_stated_text(text), _read_words)
    if not isinstance(reading.value, tuple):
        return Verdict(0.0, reading.status, reading.detail)
    words, rights = reading.value, [_words(gold) for gold in golds]
    value = float(words in rights)
    if match == "f1":
        value = max(2 * (Counter(words) & Counter(right)).total() / (len(words) + len(right)) for right in rights)
    return Verdict(value, "ok", f"{reading.detail}; gold {golds[0]!r:.60}")


def _stated_text(text: str) -> Candidate:
    """Return the announced answer, or else the whole text."""
    return find_answer(text, "exact") or Candidate("whole text", (text,))


def _read_words(text: str) -> AnswerReading:
    words = _words(text[:_MAX_CHARS])
    return _reading_of(words, text.strip()[:60])


def _reading_of(value: Any, shown: str) -> AnswerReading:
    return AnswerReading(value, "ok", shown) if value else AnswerReading(None, "no_answer", "empty")


def _words(text: str) -> tuple[str, ...]:
    """Return the words as SQuAD's script compares them: without case, punctuation, articles; here also accents."""
    bare = unicodedata.normalize("NFKD", text).casefold()
    kept = "".join(char for char in bare if char.isalnum() or char.isspace())
    return tuple(word for word in kept.split() if word not in ("a", "an", "the"))


# The escapes are the Chinese full stop and comma, and dots. Brackets and signs stay: -3 is not 3.
_SURROUNDING = " \t\r\n.,;:!?\"'`*_\u3002\u3001\u2026"


@dataclass(frozen=True, slots=True)
class Answer(Rule):
    r"""1.0 if the completion's answer equals the gold column's answer, else 0.0.

    The answer is the last announced answer (`\boxed{}`, `<answer>`, `####`, a line with `A:`, "answer is"; see
    `text.reader`, which `Math` uses, too). Without an announcement it is the last number, the whole text, or the only
    letter. Several different answers, and boxes in a box with more content, are a `conflict` and earn 0.0. A denied
    answer ("not 18"), or an answer in an HTML comment or attribute, is `no_answer` and earns 0.0. A row whose gold
    cannot be read has no value (`gold_invalid`).

    Args:
        gold: Column with the right answer: a number, or text such as "18", "... #### 18", "\\boxed{18}", "B"; or a
            list of right answers.
        kind: "number" compares exact values (`numbers`), "exact" texts without case, spacing and surrounding
            punctuation, "choice" letters A to Z (`choices`), "qa" answers to open questions (`judge_open`), whose
            gold may be a mapping with `value` and `aliases`. For "exact" and "qa" a boolean gold is true or false.
        match: For "qa": "exact" rewards an answer without other words (SQuAD's exact match), "f1" the common words, by
            SQuAD's F1. Rewarding a text that contains an answer would reward lists of candidates.
        where: "after_think" reads the text after the last `</think>` (nothing if `<think>` is open, everything
            without think tags); "all" reads the whole completion.

    Example:
        >>> Answer().score(Row(None, "9 * 2 = 18, so A: 18", None, {"answer": "She makes 9 * 2 = 18. #### 18"})).value
        1.0
    """

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True

    gold: str = "answer"
    kind: str = "number"
    where: str = "after_think"
    match: str = "exact"

    def check(self) -> None:
        check_choice(self, "kind", self.kind, (*_READERS, "qa"))
        check_choice(self, "match", self.match, ("exact", "f1"))
        if self.kind != "qa" and self.match != "exact":
            raise RuleError(f"Rule '{self.name}': match is for kind: qa, and kind is '{self.kind}'. Leave one out.")
        check_choice(self, "where", self.where, ("after_think", "all"))
        check_column(self, "gold", self.gold)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.gold,)

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        """Return the first gold's text with an announcement; None if it is blank, or neither text nor a number."""
        gold = next(iter(self._golds(columns[self.gold]) or ()), "").strip()
        return announced(gold, self.kind) if gold else None

    def score(self, row: Row) -> Verdict:
        cell = row.columns[self.gold]
        golds = self._golds(cell)
        if golds is None:
            advice = ": kind: exact reads it" if isinstance(cell, bool) else ""
            told = f"column '{self.gold}': {cell!r:.60} is neither text nor a number{advice}"
            return Verdict(None, "gold_invalid", told)
        if self.kind == "qa":
            return judge_open(visible(row.text, self.where), golds, self.match)
        return best(self._against(gold, row) for gold in golds)

    def _golds(self, cell: Any) -> list[str] | None:
        if isinstance(cell, bool) and self.kind in ("exact", "qa"):
            return [str(cell).lower()]
        return accepted(cell) if self.kind == "qa" else golds_of(cell)

    def _against(self, text: str, row: Row) -> Verdict:
        gold = read_gold(self.kind, text)
        if gold.status != "ok":
            return Verdict(None, "gold_invalid", f"column '{self.gold}': {gold.detail}")
        found = _READERS[self.kind](visible(row.text, self.where))
        if found.value is None:
            return Verdict(self.floor, found.status, found.detail)
        told = f"{found.detail}; gold {gold.detail}"
        if isinstance(found.value, tuple) and gold.value in found.value:
            return Verdict(None, "undecided", told)
        same = gold.value == found.value
        if self.kind == "number" and same and found.is_left and not gold.is_left:
            return Verdict(self.floor, "ok", f"{told}; left to compute: a quotient of numbers")
        if self.kind == "number" and isinstance(gold.value, str) and isinstance(found.value, str):
            same |= gold.value[:-3] == found.value or gold.value == found.value[:-3]  # "4:30" and "4:30 pm"
        return Verdict(float(same), "ok", told)


def announced(gold: str, kind: str) -> str:
    r"""Return a gold column's answer as a completion, without the solution that may precede it.

    Example:
        >>> announced("9 * 2 = 18. #### 18", "number"), announced("$18$", "number"), announced("B) Paris", "choice")
        ('The answer is 18', '<answer>$18$</answer>', 'B) Paris')
    """
    found = None if kind == "qa" else find_answer(gold, kind, trusted=True)
    content = found.contents[-1] if found and found.contents else gold
    if found is not None and not found.encloses:
        return f"The answer is {content}"
    if found is None and kind == "choice":  # A tag would change the reading of a bare letter.
        return gold
    return f"<answer>{content}</answer>"


def read_exact(text: str) -> AnswerReading:
    """Read the announced text, or else the whole text, without case, spacing and surrounding punctuation.

    Example:
        >>> read_exact("The answer is  New   York.").value
        'new york'
    """
    return read_all(_stated_text(text), _read_plain)


def _read_plain(text: str) -> AnswerReading:
    plain = _plain(text)
    return _reading_of(plain, plain[:60])


def _plain(text: str) -> str:
    text = CLOCK.sub(time_of, text) if ":" in text else text
    return " ".join(normalized(text).casefold().split()).strip(_SURROUNDING)


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their gold.
def read_gold(kind: str, gold: str) -> AnswerReading:
    return read_gold_number(gold) if kind == "number" else _READERS[kind](gold)


_READERS = {"number": read_number, "exact": read_exact, "choice": read_choice}

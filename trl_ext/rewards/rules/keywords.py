"""Judge whether required words occur often enough and forbidden ones not too often."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_whole
from trl_ext.rewards.text.prose import count_word, normalized, refusal, unmarked

Counted = Mapping[str, int] | Sequence[str | Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Keywords(Rule):
    """Share of the required keywords that occur often enough; 0.0 if a forbidden keyword occurs too often.

    A keyword is plain text of one word or several. Chinese, Japanese, Korean and Thai keywords match anywhere, because
    their texts do not show the end of a word. Texts are normalized (`prose.normalized`): full-width letters, invisible
    characters and Markdown's emphasis (`_cannot_`, `can**not**`) do not hide a word. A keyword with `*`, `_`, `~` or a
    backtick is searched with the Markdown. Extra occurrences earn nothing; to punish them, give the same word a
    required and a forbidden count. A blank completion earns 0.0 with status `no_answer`.

    Args:
        required: Keywords with their least number of occurrences: a list (once each), a mapping `{"therefore": 2}`, or
            both as a list `["because", ["therefore", 2]]`.
        forbidden: Keywords with their most occurrences, in the same forms; in a plain list: never.
        ignore_case: True takes "Cat" for "cat".
        whole_word: True matches "cat" only as a separate word; False also in "cathedral".
        partial: True gives the share of required keywords that occur often enough; False gives 0.0 unless all do.

    Example:
        >>> Keywords(required=("because", "so")).score(Row(None, "Because of rain.", None, {})).value
        0.5
        >>> Keywords({"so": 1}, {"so": 2}).score(Row(None, "So, so, so!", None, {})).detail
        'too often: so'
    """

    tier: ClassVar[str] = "inline"

    required: Counted = ()
    forbidden: Counted = ()
    ignore_case: bool = True
    whole_word: bool = True
    partial: bool = True

    def check(self) -> None:
        required = counted(self, "required", self.required, usual=1, least=1)
        forbidden = counted(self, "forbidden", self.forbidden, usual=0, least=0)
        if not required and not forbidden:
            raise RuleError(f"Rule '{self.name}' has no keywords. Give required=(...) or forbidden=(...).")
        most = {word: count for word, _, count in folded_words(forbidden, self.ignore_case, 0)}
        for word, shown, count in folded_words(required, self.ignore_case, 1):
            if count > most.get(word, count):
                both = f"{shown!r} is required {count} times and allowed {most[word]} times"
                raise RuleError(f"Rule '{self.name}': {both}. Take it out of one list, or allow it more often.")
        object.__setattr__(self, "required", required)
        object.__setattr__(self, "forbidden", forbidden)

    def score(self, row: Row) -> Verdict:
        refused = refusal(self, row.text)
        if refused:
            return refused
        forbidden = folded_words(self.forbidden, self.ignore_case, 0)
        required = folded_words(self.required, self.ignore_case, 1)
        text = cased(row.text, self.ignore_case)
        if any(" " in word for word, _, _ in (*forbidden, *required)):  # Otherwise spaces do not matter.
            text = " ".join(text.split())
        texts = text, unmarked(text)
        excess = [shown for word, shown, most in forbidden if self._count(word, texts, most + 1) > most]
        if excess:
            return Verdict(self.floor, "ok", f"too often: {', '.join(excess)}")
        missing = [shown for word, shown, least in required if self._count(word, texts, least) < least]
        if not missing:
            return Verdict(1.0, "ok", "all met")
        share = 1.0 - len(missing) / len(required) if self.partial else self.floor
        return Verdict(share, "ok", f"missing: {', '.join(missing)}")

    def _count(self, word: str, texts: tuple[str, str], enough: int) -> int:
        text = texts[not any(mark in word for mark in "*_~`")]
        return count_word(text, word, enough) if self.whole_word else text.count(word)


def cased(text: str, ignore_case: bool) -> str:
    text = normalized(text)
    return text.casefold() if ignore_case else text


def fold(word: str, ignore_case: bool) -> str:
    """Return a keyword in the form for the comparison."""
    return " ".join(cased(word, ignore_case).split())


@lru_cache(maxsize=256)
def folded_words(entries: tuple[Any, ...], ignore_case: bool, usual: int) -> tuple[tuple[str, str, int], ...]:
    """Return each keyword in the form for the comparison and as it was given, with its count."""
    pairs = _with_counts(entries, usual)
    return tuple((fold(word, ignore_case), word, count) for word, count in pairs)


def _with_counts(entries: Iterable[Any], usual: int) -> list[Any]:
    """Return each keyword with its count: the usual count for a keyword that is given alone."""
    return [(entry, usual) if isinstance(entry, str) else entry for entry in entries]


def counted(rule: Keywords, key: str, value: Any, usual: int, least: int) -> tuple[Any, ...]:
    """Read keywords as words, or as (word, count) if the count is not the usual count; or raise RuleError.

    Args:
        rule: The rule, for its name and its case.
        key: Name of its field, for messages.
        value: Content of this field.
        usual: Count of a word that is given without a count.
        least: The lowest count that makes sense.
    """
    if not isinstance(value, Mapping | list | tuple):
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give a list of words, or a mapping to counts.")
    entries = value.items() if isinstance(value, Mapping) else value
    pairs = _with_counts(entries, usual)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise RuleError(f"Rule '{rule.name}': {key} holds {pair!r}. Give a word, or a word and a count.")
        check_whole(rule, f"the count of {pair[0]!r} in {key}", pair[1], least)
    folded = [fold(word, rule.ignore_case) for word, _ in pairs]
    if "" in folded or len(set(folded)) < len(folded):
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give different words that are not blank.")
    return tuple(word if count == usual else (word, count) for word, count in pairs)

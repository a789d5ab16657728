"""Judge whether the completion is about the prompt's subject, in words of its own.

The test compares words: it tells an answer about the subject from one about something else, and no more. A correct
answer of one word ("Paris.") repeats nothing of its prompt and earns 0.0, so use it for prose, with a small weight. A
model that compares meanings is a judge (`Judge`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import regex

from trl_ext.rewards.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.scorer import warn_once
from trl_ext.rewards.text.prompt import question_text
from trl_ext.rewards.text.prose import MAX_CHARS, UNSPACED, normalized, refusal, text_part

_RUN = regex.compile(rf"[{UNSPACED}]+|[^\W_{UNSPACED}]+")
_ASCII_WORD = re.compile("[a-z0-9]+")
_UNSPACED_CHAR = regex.compile(rf"[{UNSPACED}]")
_COPY_NGRAM = 5  # Words (or unspaced characters) in a row that are a copy and not a coincidence.
# Words that say nothing of a subject, in English and Chinese; elsewhere frequency in the prompt weighs them down.
_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been before but by can could did do does each for from "
    "get give given had has have he her his how i if in into is it its just let make many may me more most much my no "
    "not of on one or other our out over please s she should so some such than that the their them then there these "
    "they this those to up us use very was we were what when where which while who whose why will with would you your "
    "我们 你们 他们 它们 这个 那个 什么 怎么 怎样 为什 如何 可以 一个 一些 以及 或者 "
    "因为 所以 但是 如果 就是 不是 没有 请问 是否 多少 哪些".split()
)


@dataclass(frozen=True, slots=True)
class Relevance(Rule):
    """Share of the prompt's content that the completion mentions, less what it copies.

        value = max(0, min(1, mentioned / enough) * min(1, own / shared) - copied)

    `mentioned` is the share, by weight, of the prompt's content words that occur in the completion, however often.
    A word's weight is ln(1 + n / c) for its c occurrences among the prompt's n words, so it does not depend on the
    completion; stop words weigh nothing. Chinese, Japanese, Korean and Thai count by pairs of characters.

    `own` and `shared` count the completion's different content words that the prompt lacks and has: the prompt's words
    in another order are no answer. `copied` is the share of the prompt's 5-grams that stand in the completion word
    for word. A completion without a content word of its own earns 0.0 with status `no_answer`.

    A row whose prompt has no content words has no value (`gold_invalid`). Of a conversation only the last user message
    is compared.

    Args:
        enough: Share of the prompt's content, above 0 and up to 1, from which on more mentions earn no more.
        where: "all" reads the whole completion, "after_think" what follows the last `</think>`.

    Example:
        >>> Relevance().score(Row("Why is the sky blue?", "Air scatters blue light from the sky.", None, {})).value
        1.0
    """

    tier: ClassVar[str] = "inline"

    enough: float = 0.5
    where: str = "all"

    def check(self) -> None:
        check_choice(self, "where", self.where, ("all", "after_think"))
        warn_once(
            (type(self), self.name),
            f"Rule '{self.name}' counts words in common and knows no meanings: nonsense with the prompt's words earns "
            "1.0. For meanings ask the rule judge, or a server by an AsyncRule (docs/reference/judges.md).",
        )
        check_number(self, "enough", self.enough, "a share above 0, up to 1", lambda share: 0 < share <= 1)

    def score(self, row: Row) -> Verdict:
        prompt = read_prompt(question_text(row.prompt))
        if not prompt.weights:
            return Verdict(None, "gold_invalid", "the prompt has no content words")
        refused = refusal(self, row.text)
        if refused:
            return refused
        units = units_of(text_part(row.text, self.where))
        terms = frozenset(terms_of(units))
        shared = [term for term in prompt.weights if term in terms]
        own = len(terms) - len(shared)
        if not own:
            return Verdict(self.floor, "no_answer", "no content words of its own")
        # In the prompt's order, because a sum of floats depends on it.
        mentioned = sum(prompt.weights[term] for term in shared) / prompt.total
        copied = len(prompt.ngrams.intersection(ngrams(units))) / len(prompt.ngrams) if prompt.ngrams else 0.0
        value = max(0.0, min(1.0, mentioned / self.enough) * min(1.0, own / max(len(shared), 1)) - copied)
        detail = f"{mentioned:.0%} of the prompt mentioned, {copied:.0%} copied, {own} words added"
        return Verdict(value, "ok", detail)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as completions are compared with it: its terms with their weights, their sum, and its 5-grams."""

    weights: Mapping[str, float]
    total: float
    ngrams: frozenset[tuple[str, ...]]


@lru_cache(maxsize=256)  # The completions of a GRPO group share their prompt.
def read_prompt(text: str) -> Prompt:
    """Read the content of a prompt's last MAX_CHARS characters: the question stands at the end."""
    units = units_of(text[-MAX_CHARS:])
    counts = Counter(terms_of(units))
    weights = {term: math.log1p(len(units) / count) for term, count in counts.items()}
    return Prompt(weights, sum(weights.values()), frozenset(ngrams(units)))


def units_of(text: str) -> list[str]:
    """Split into words without case and punctuation, and runs of characters of scripts without spaces."""
    text = normalized(text).casefold()
    return _ASCII_WORD.findall(text) if text.isascii() else _RUN.findall(text)


def unspaced(unit: str) -> bool:
    """Return True for a run of characters of a script without spaces."""
    return not unit.isascii() and _UNSPACED_CHAR.match(unit) is not None


def terms_of(units: list[str]) -> Iterator[str]:
    """Yield content words, and pairs of characters where words are not spaced; a lone character is a term."""
    for unit in units:
        if not unspaced(unit):
            yield from () if unit in _STOP_WORDS else (unit,)
        elif len(unit) == 1:
            yield unit
        else:
            pairs = (unit[i : i + 2] for i in range(len(unit) - 1))
            yield from (pair for pair in pairs if pair not in _STOP_WORDS)


def ngrams(units: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield all 5-grams, of words, and of single characters where words are not spaced."""
    single = [part for unit in units for part in (unit if unspaced(unit) else (unit,))]
    return zip(*(single[start:] for start in range(_COPY_NGRAM)), strict=False)

r"""Judge the answer to an open question by the accepted answers: SQuAD's exact match and F1 of words.

The announced answer is read (see `reader`), or else the whole text: an answer among other words is not exact, so a
list of candidates earns nothing.
"""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trl_ext.rewards.base.rule import Verdict
from trl_ext.rewards.text.golds import golds_of
from trl_ext.rewards.text.reader import stated

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
    """Return the verdict on a completion by "exact" (SQuAD's exact match) or "f1" (of its words)."""
    found = stated(text, "exact")
    if found is not None and found.status != "ok":
        return Verdict(0.0, found.status, found.detail)
    answers = (text,) if found is None else found.contents
    if len({" ".join(_words(answer)) for answer in answers}) > 1:
        return Verdict(0.0, "conflict", f"several answers, such as {' and '.join(answers[:2])!r:.80}")
    words, rights = _words(answers[0][:_MAX_CHARS]), [_words(gold) for gold in golds]
    if not words:
        return Verdict(0.0, "no_answer", "empty")
    value = float(words in rights)
    if match == "f1":
        value = max(2 * (Counter(words) & Counter(right)).total() / (len(words) + len(right)) for right in rights)
    return Verdict(value, "ok", f"{answers[0].strip()!r:.60}; gold {golds[0]!r:.60}")


def _words(text: str) -> list[str]:
    """Return the words as SQuAD's script compares them: without case, punctuation, articles; here also accents."""
    bare = unicodedata.normalize("NFKD", text).casefold()
    kept = "".join(char for char in bare if char.isalnum() or char.isspace())
    return [word for word in kept.split() if word not in ("a", "an", "the")]

"""Judge how much the completion repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_ext.rewards.rule import Row, Rule, Verdict, check_whole
from trl_ext.rewards.text.prose import refusal, words

_MIN_SORTED = 64  # Below this many ids a set is as fast.


@dataclass(frozen=True, slots=True)
class Repetition(Rule):
    """1 minus the share of repeated n-grams: different n-grams divided by all n-grams.

    The n-grams are of token ids where there are any, else of words; a text above `prose.MAX_CHARS` is not split into
    words and earns 0.0 with status `too_long`. A text too short for one n-gram repeats nothing (1.0); a blank one
    earns 0.0 with status `no_answer`.

    Args:
        ngram: Tokens (or words) in a row that count as one unit.

    Example:
        >>> Repetition(ngram=1).score(Row(None, "no no no yes", None, {})).value
        0.5
    """

    tier: ClassVar[str] = "inline"

    ngram: int = 3

    def check(self) -> None:
        check_whole(self, "ngram", self.ngram, least=1)

    def score(self, row: Row) -> Verdict:
        refused = None if row.completion_ids else refusal(self, row.text)
        if refused:
            return refused
        units: Sequence[object] = row.completion_ids or words(row.text)
        num_ngrams = len(units) - self.ngram + 1
        if num_ngrams <= 0:
            return Verdict(1.0, "ok", f"shorter than {self.ngram}")
        different = num_different(units, self.ngram)
        return Verdict(different / num_ngrams, "ok", f"{num_ngrams - different} of {num_ngrams} repeat")


def num_different(units: Sequence[Any], ngram: int) -> int:
    """Count the different n-grams of token ids or words.

    Where an n-gram of ids fits into 63 bits, as three ids below 2 million do, it is counted as one number: numpy sorts
    these numbers in a third of the time that a set of tuples takes.
    """
    codes = codes_of(units, ngram) if len(units) >= _MIN_SORTED and isinstance(units[0], int) else None
    if codes is None:
        return len(set(zip(*(units[start:] for start in range(ngram)), strict=False)))
    codes.sort()
    return 1 + int((codes[1:] != codes[:-1]).sum())


def codes_of(ids: Sequence[int], ngram: int) -> Any:
    """Return each n-gram of ids as one number, an array; None where an n-gram does not fit into 63 bits."""
    import numpy as np  # Here, so that whoever reads rules without scoring does not wait for it.

    try:
        digits = np.fromiter(ids, dtype=np.int64, count=len(ids))
    except OverflowError:
        return None
    base = int(digits.max()) + 1
    if digits.min() < 0 or base**ngram >= 1 << 63:
        return None
    codes = digits[ngram - 1 :].copy()
    for back in range(1, ngram):
        codes += digits[ngram - 1 - back : len(digits) - back] * base**back
    return codes

"""Judge how much the completion repeats itself."""

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_whole
from trl_ext.rewards.text.prose import refusal, words

_MIN_SORTED = 64  # Below this many ids a set is as fast.


@dataclass(frozen=True, slots=True)
class Repetition(Rule):
    """1 minus the share of repeated n-grams: different n-grams divided by all n-grams.

    The n-grams are of token ids, or of words if the row has no ids; without ids a text above `prose.MAX_CHARS` earns
    0.0 with status `too_long`. A text too short for an n-gram repeats nothing (1.0); a blank text earns 0.0 with
    status `no_answer`.

    Args:
        ngram: Tokens (or words) in an n-gram.

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
    """Count the different n-grams of token ids or words."""
    # An n-gram of ids that fits into 63 bits, such as three ids below 2 million, becomes one number: numpy sorts these
    # numbers in half the time of a set of tuples.
    if len(units) >= _MIN_SORTED and isinstance(units[0], int):
        import numpy as np  # Here, because reading rules without scoring does not need it.

        with suppress(struct.error):  # an id beyond 64 bits, or None
            # A quarter of the time of numpy's conversion of Python's numbers.
            ids = np.frombuffer(struct.pack(f"{len(units)}q", *units), dtype=np.int64)
            base = int(ids.view(np.uint64).max()) + 1  # huge where an id is negative
            if base**ngram < 1 << 63:
                last = len(ids) - ngram + 1
                codes = ids[:last].copy()
                for place in range(1, ngram):
                    codes *= base
                    codes += ids[place : last + place]
                codes.sort()
                return 1 + int(np.count_nonzero(codes[1:] != codes[:-1]))
    return len(set(zip(*(units[start:] for start in range(ngram)), strict=False)))

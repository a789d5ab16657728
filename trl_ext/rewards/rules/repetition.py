"""Judge how much the completion repeats itself."""

import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_whole
from trl_ext.rewards.text.prose import MAX_CHARS, refusal, words

_MIN_SORTED = 64  # Below this many ids a set is as fast.
_NUMBER = re.compile("([0-9]{1,15})")  # Python's `int` refuses thousands of digits.
_BEFORE_CHARS = 6  # Numbers after the same characters, such as "step ", belong to one counter.


@dataclass(frozen=True, slots=True)
class Repetition(Rule):
    """1 minus the share of repeated n-grams: different n-grams divided by all n-grams.

    The n-grams are of token ids, or of words if the row has no ids; without ids a text above `prose.MAX_CHARS` earns
    0.0 with status `too_long`. A text too short for an n-gram repeats nothing (1.0); a blank text earns 0.0 with
    status `no_answer`.

    A counter does not hide a loop. Its numbers rise in equal steps after the same characters ("step 1 step 2 step 3").
    If each counter's numbers are replaced by one sign, the extra repetition of words is subtracted.

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
        hidden = counted_frac(row.text, self.ngram) if len(row.text) <= MAX_CHARS else 0.0
        detail = f"{num_ngrams - different} of {num_ngrams} repeat"
        detail += f", and {hidden:.0%} of the words but for their counters" if hidden else ""
        return Verdict(max(0.0, different / num_ngrams - hidden), "ok", detail)


def counted_frac(text: str, ngram: int) -> float:
    """Return the loss in the share of different n-grams of words if each counter's numbers become one sign.

    Example:
        >>> round(counted_frac("step 1 step 2 step 3 step 4 step 5", 1), 2)
        0.1
    """
    parts = _NUMBER.split(text)
    befores = [before[-_BEFORE_CHARS:] for before in parts[:-1:2]]
    if len(befores) - len(set(befores)) < 2:  # There are no three numbers after the same characters.
        return 0.0
    counters: dict[str, tuple[int, int]] = {}  # last number and last step
    same = False
    for place, (before, digits) in enumerate(zip(befores, parts[1::2], strict=True)):
        number = int(digits)
        last, step = counters.get(before, (number, 0))
        counters[before] = number, number - last
        if step and number - last == step:
            parts[2 * place + 1], same = "#", True
    if not same:
        return 0.0
    shares = []
    for units in (words(text), words("".join(parts))):
        shares.append(num_different(units, ngram) / max(1, len(units) - ngram + 1))
    return max(0.0, shares[0] - shares[1])


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

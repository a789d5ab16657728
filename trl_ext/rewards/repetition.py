"""Does the completion repeat itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_ext.rewards.rule import Row, Rule, Verdict, check_whole
from trl_ext.rewards.words import words


@dataclass(frozen=True, slots=True)
class Repetition(Rule):
    """1 minus the share of repeated n-grams: different n-grams divided by all n-grams.

    Counted on token ids where they are there, else on words. A text too short for one n-gram repeats nothing (1.0); an
    empty one earns 0.0 with status `no_answer`.

    Args:
        ngram: Tokens (or words) in a row that count as one unit.

    Example:
        >>> Repetition(ngram=1).score(Row(None, "no no no yes", None, {})).value
        0.5
    """

    ngram: int = 3

    def check(self) -> None:
        check_whole(self, "ngram", self.ngram, least=1)

    def score(self, row: Row) -> Verdict:
        units: Sequence[object] = row.completion_ids if row.completion_ids is not None else words(row.text)
        if not units:
            return Verdict(self.floor, "no_answer", "empty")
        num_ngrams = len(units) - self.ngram + 1
        if num_ngrams <= 0:
            return Verdict(1.0, "ok", f"shorter than {self.ngram}")
        different = len(set(zip(*(units[start:] for start in range(self.ngram)), strict=False)))
        return Verdict(different / num_ngrams, "ok", f"{num_ngrams - different} of {num_ngrams} repeat")

"""The choice of pairs among the samples of one prompt."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.rewards.preference.data import check_number_from, falls_short


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Bounds of `build_pairs`: least gap of scores, largest ratio of lengths (at least 1), most pairs of a prompt."""

    min_gap: float
    max_length_ratio: float
    max_pairs_per_prompt: int

    def __post_init__(self) -> None:
        check_number_from("min_gap", self.min_gap, 0.0)
        check_number_from("max_length_ratio", self.max_length_ratio, 1.0)
        check_number_from("max_pairs_per_prompt", self.max_pairs_per_prompt, 1)
        if not isinstance(self.max_pairs_per_prompt, int):
            raise ConfigError(f"max_pairs_per_prompt is {self.max_pairs_per_prompt!r}. Give a whole number.")


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion.

    Args:
        row: Its row in the dataset.
        completion: The completion as it is there, text or messages.
        text: Its text.
        length: The text's length, in the unit of `length` of `build_pairs`.
        score: The rules' total.
    """

    row: int
    completion: Any
    text: str
    length: float
    score: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples of one prompt, the better one first."""

    chosen: Sample
    rejected: Sample

    @property
    def gap(self) -> float:
        """Difference of the scores."""
        return self.chosen.score - self.rejected.score

    @property
    def length_ratio(self) -> float:
        """The longer length divided by the shorter, at least 1; infinite where only one length is 0."""
        short, long = sorted((self.chosen.length, self.rejected.length))
        return long / short if short > 0 else 1.0 if long == short else float("inf")


def choose_pairs(samples: Sequence[Sample], limits: PairLimits, tally: Counter[str]) -> list[Pair]:
    """Choose the pairs of one prompt, each sample at most once; refused candidates are counted in `tally`.

    Pairs closest in length come first, then those with the larger gap, then the earlier ones (sorting keeps order).
    """
    # Sorting keeps the earlier one first where two tie.
    pairs = [Pair(*sorted(two, key=lambda sample: -sample.score)) for two in combinations(samples, 2)]
    apart = [pair for pair in pairs if is_preference(pair, limits.min_gap)]
    alike = [pair for pair in apart if pair.length_ratio <= limits.max_length_ratio]
    tally["num_too_close"] += len(pairs) - len(apart)
    tally["num_too_unlike"] += len(apart) - len(alike)
    return disjoint(sorted(alike, key=lambda pair: (pair.length_ratio, -pair.gap)), limits.max_pairs_per_prompt)


def is_preference(pair: Pair, min_gap: float) -> bool:
    """True where the texts differ and the scores do by `min_gap`; a gap of 0 prefers nothing."""
    return pair.gap > 0 and not falls_short(pair.gap, min_gap) and pair.chosen.text != pair.rejected.text


def disjoint(pairs: Iterable[Pair], most: int) -> list[Pair]:
    """The first pairs that share no sample and repeat no two texts, at most `most` of them."""
    used: set[int] = set()
    texts: set[tuple[str, str]] = set()
    kept: list[Pair] = []
    for pair in pairs:
        # By identity: two samples may be equal.
        members, words = {id(pair.chosen), id(pair.rejected)}, (pair.chosen.text, pair.rejected.text)
        if len(kept) < most and not used & members and words not in texts:
            kept.append(pair)
            used |= members
            texts.add(words)
    return kept

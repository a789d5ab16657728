"""Reports of the tools for pairs, in counts and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trl_ext.rewards.preference.choice import Pair, PairLimits

REASONS = ("empty", "identical", "different_prompt", "contradicted")
_MAX_ROWS_NAMED = 3


@dataclass(frozen=True, slots=True)
class PairReport:
    """The report of `build_pairs`: what became of the samples. `print(report)` gives a table.

    Candidates are all pairs of a prompt's samples that have a score and a text. `num_too_close` of them differ too
    little in score (or are the same text), and of the others `num_too_unlike` differ too much in length.
    Mean lengths are in the unit of `length`, over the pairs made.
    """

    num_prompts: int
    num_samples: int
    num_unscored: int
    num_blank: int
    num_too_close: int
    num_too_unlike: int
    num_pairs: int
    num_prompts_without_pair: int
    mean_chosen_length: float
    mean_rejected_length: float

    @classmethod
    def of(cls, tally: Mapping[str, int], pairs: Sequence[Pair]) -> "PairReport":
        """The report of what was counted on the way to these pairs, at least one."""
        names = [name for name in cls.__dataclass_fields__ if name.startswith("num_") and name != "num_pairs"]
        chosen = sum(pair.chosen.length for pair in pairs) / len(pairs)
        rejected = sum(pair.rejected.length for pair in pairs) / len(pairs)
        counts = {name: tally[name] for name in names}
        return cls(**counts, num_pairs=len(pairs), mean_chosen_length=chosen, mean_rejected_length=rejected)

    def __str__(self) -> str:
        refused = f"{self.num_too_close} too close in score, {self.num_too_unlike} too unlike in length"
        lengths = f"mean length {self.mean_chosen_length:.1f} chosen, {self.mean_rejected_length:.1f} rejected"
        lines = (
            ("prompts", self.num_prompts, f"{self.num_prompts_without_pair} without a pair"),
            ("samples", self.num_samples, f"{self.num_unscored} without a score, {self.num_blank} blank"),
            ("refused", self.num_too_close + self.num_too_unlike, refused),
            ("pairs", self.num_pairs, lengths),
        )
        return "\n".join(f"{name:8} {count:>7}  {note}" for name, count, note in lines)


def no_pair_message(tally: Mapping[str, int], limits: PairLimits) -> str:
    """The sentences for no pair at all: why, in counts, and what to loosen."""
    counts = (
        f"Not a single pair came out of {tally['num_prompts']} prompts with {tally['num_samples']} samples: "
        f"{tally['num_unscored']} samples have no score, {tally['num_blank']} are blank; of the candidate pairs "
        f"{tally['num_too_close']} are too close in score and {tally['num_too_unlike']} too unlike in length."
    )
    if tally["num_too_unlike"]:
        return f"{counts} Raise max_length_ratio (now {limits.max_length_ratio:g}), or give more samples per prompt."
    if tally["num_too_close"]:
        return (
            f"{counts} Lower min_gap (now {limits.min_gap:g}), or sample more per prompt and at a higher temperature."
        )
    return f"{counts} Give at least two samples per prompt that have a text and that the rules can score."


@dataclass(frozen=True, slots=True)
class FilterReport:
    """The report of `filter_pairs`: what was dropped, and why. `print(report)` gives a table.

    Rows are counted once, under the first reason that holds. `unscored` rows are kept. `first_rows` maps each reason
    (and `unscored`) to the numbers of its first three rows in the dataset that came in, counted from 0.
    """

    total: int
    kept: int
    empty: int
    identical: int
    different_prompt: int
    contradicted: int
    unscored: int
    first_rows: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, reasons: Sequence[str | None], unscored: Sequence[int]) -> "FilterReport":
        """The report of one reason or None per row, and the numbers of the rows without a score."""
        rows = {reason: [row for row, given in enumerate(reasons) if given == reason] for reason in REASONS}
        rows["unscored"] = list(unscored)
        counts = {reason: len(found) for reason, found in rows.items()}
        first = {reason: tuple(found[:_MAX_ROWS_NAMED]) for reason, found in rows.items()}
        return cls(total=len(reasons), kept=reasons.count(None), first_rows=first, **counts)

    def __str__(self) -> str:
        lines = [("", "rows", "first rows")]
        for reason, first in self.first_rows.items():
            name = "unscored (kept)" if reason == "unscored" else reason
            lines.append((name, str(getattr(self, reason)), ", ".join(map(str, first))))
        lines.append(("kept", str(self.kept), f"of {self.total}"))
        return "\n".join(f"{name:16} {count:>7}  {rows}".rstrip() for name, count, rows in lines)


def nothing_left_message(report: FilterReport, min_gap: float) -> str:
    """The sentences for no pair left: the reason that took most, what to do about it, and the table."""
    most = max(REASONS, key=lambda reason: getattr(report, reason))
    advice = {
        "contradicted": f"Lower min_gap (now {min_gap:g}), or see whether chosen and rejected are swapped.",
        "different_prompt": "Give each pair's prompt once, in a column 'prompt'.",
    }.get(most, "Look at the rows named here, and at how they were made.")
    return f"Not one of the {report.total} pairs is left; most are '{most}'. {advice}\n{report}"

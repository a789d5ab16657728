"""Make preference pairs for a reward model from several scored samples per prompt.

The samples of a pair have about the same length, because a reward model learns length wherever length gives the better
side away. Left out: pairs across prompts, ties, and the choice of the best and the worst sample only (which are
often the longest and the shortest).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from numbers import Real
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.preference import data
from trl_ext.rewards.rows import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

Scored = tuple[int, Any, float | None]  # Row in the dataset, completion as it is there, the rules' total.

_MADE_COLUMNS = ("chosen", "rejected", "chosen_score", "rejected_score", "rule_gap", "margin")


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Bounds of `build_pairs`: least gap of scores, largest ratio of lengths (at least 1), most pairs of a prompt."""

    min_gap: float
    max_length_ratio: float
    max_pairs_per_prompt: int

    def __post_init__(self) -> None:
        data.check_number_from("min_gap", self.min_gap, 0.0)
        data.check_number_from("max_length_ratio", self.max_length_ratio, 1.0)
        data.check_number_from("max_pairs_per_prompt", self.max_pairs_per_prompt, 1)
        if not isinstance(self.max_pairs_per_prompt, int):
            raise ConfigError(f"max_pairs_per_prompt is {self.max_pairs_per_prompt!r}. Give a whole number.")


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion: its row in the dataset, itself as it is there, its text with its length, its total."""

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


@dataclass(frozen=True, slots=True)
class PairReport:
    """The report of `build_pairs`: what became of the samples. `print(report)` shows the counts.

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

    __str__ = data.counts


def build_pairs(
    dataset: "Dataset",
    rules: data.Scorer,
    *,
    completions: str = "completions",
    min_gap: float = 0.5,
    max_length_ratio: float = 1.5,
    max_pairs_per_prompt: int = 2,
    margin: bool = False,
    length: Callable[[str], float] | None = None,
) -> tuple["Dataset", PairReport]:
    """Make preference pairs from samples that rules score.

    A pair is two samples of one prompt with texts that are not blank. Per prompt the pairs closest in length come
    first, then those with the larger gap, then the earlier ones; each sample is used at most once. Same data, same
    pairs. Samples without a score (a gold answer that cannot be read) take no part.

    Args:
        dataset: One prompt a row: `prompt` (text or messages) and a list of samples (text or messages each). Or one
            sample a row: `prompt` and `completion`; rows with the same prompt then belong together. Plus the columns
            that the rules read.
        rules: A RuleSet; scores every sample once.
        completions: Column with the lists of samples.
        min_gap: Least difference of the scores, in units of the rules' total. 0 still refuses ties.
        max_length_ratio: Most that the longer text may be, as a multiple of the shorter.
        max_pairs_per_prompt: Few, so that prompts with many samples do not outweigh the others.
        margin: Add the column `margin`, which TRL's reward loss subtracts: the gap.
        length: A function from a text to its length; None counts characters. For tokens give
            `lambda text: len(tokenizer.encode(text))`.

    Returns:
        Columns prompt, chosen, rejected, chosen_score, rejected_score, rule_gap, margin if wanted, and the other
        columns of the row that holds the chosen sample; and the report.

    Raises:
        DataError: Columns are missing or taken, or not a single pair comes out.
        ConfigError: A limit cannot work.

    Examples:
        `pairs, report = build_pairs(samples, RuleSet([Answer()]))`, then `report.num_pairs, report.num_too_unlike`.
    """
    limits = PairLimits(min_gap, max_length_ratio, max_pairs_per_prompt)
    dataset = data.checked_dataset(dataset, (("prompt", completions), ("prompt", "completion")))
    made = _MADE_COLUMNS if margin else _MADE_COLUMNS[:-1]
    taken = [name for name in made if name in dataset.column_names]
    if taken:
        raise DataError(
            f"The dataset already has the columns {', '.join(taken)}, which build_pairs makes. Rename them."
        )
    column = completions if completions in dataset.column_names else "completion"
    listed = column == completions
    groups = [[row] for row in range(len(dataset))] if listed else rows_by_prompt(dataset)
    tally, pairs = Counter(num_prompts=len(groups)), list[Pair]()
    for part in data.chunks(groups, "Scoring samples", " prompts"):
        for scored in scored_groups(dataset, part, rules, column, listed):
            found = choose_pairs(usable(scored, length or len, tally), limits, tally)
            tally["num_prompts_without_pair"] += not found
            pairs += found
    if not pairs:
        raise DataError(no_pair_message(tally, limits))
    return pair_dataset(dataset, pairs, column, made), PairReport.of(tally, pairs)


def choose_pairs(samples: Sequence[Sample], limits: PairLimits, tally: Counter[str]) -> list[Pair]:
    """Choose the pairs of one prompt, each sample at most once; refused candidates are counted in `tally`.

    Pairs closest in length come first, then those with the larger gap, then the earlier ones (sorting keeps order).
    """
    pairs = [Pair(*sorted(two, key=lambda sample: -sample.score)) for two in combinations(samples, 2)]
    # A gap of 0 prefers nothing.
    apart = [pair for pair in pairs if pair.gap > 0 and not data.falls_short(pair.gap, limits.min_gap)]
    apart = [pair for pair in apart if pair.chosen.text != pair.rejected.text]
    alike = [pair for pair in apart if pair.length_ratio <= limits.max_length_ratio]
    tally["num_too_close"] += len(pairs) - len(apart)
    tally["num_too_unlike"] += len(apart) - len(alike)
    used: set[int] = set()
    texts: set[tuple[str, str]] = set()
    kept: list[Pair] = []
    for pair in sorted(alike, key=lambda pair: (pair.length_ratio, -pair.gap)):
        # By identity: two samples may be equal.
        members, words = {id(pair.chosen), id(pair.rejected)}, (pair.chosen.text, pair.rejected.text)
        if len(kept) < limits.max_pairs_per_prompt and not used & members and words not in texts:
            kept.append(pair)
            used |= members
            texts.add(words)
    return kept


def no_pair_message(tally: Mapping[str, int], limits: PairLimits) -> str:
    """The sentences for no pair at all: why, in counts, and what to loosen."""
    advice = "Give at least two samples per prompt that have a text and that the rules can score."
    if tally["num_too_unlike"]:
        advice = f"Raise max_length_ratio (now {limits.max_length_ratio:g}), or give more samples per prompt."
    elif tally["num_too_close"]:
        advice = f"Lower min_gap (now {limits.min_gap:g}), or sample more per prompt and at a higher temperature."
    return (
        f"Not a single pair came out of {tally['num_prompts']} prompts with {tally['num_samples']} samples: "
        f"{tally['num_unscored']} samples have no score, {tally['num_blank']} are blank; of the candidate pairs "
        f"{tally['num_too_close']} are too close in score and {tally['num_too_unlike']} too unlike in length. {advice}"
    )


def rows_by_prompt(dataset: "Dataset") -> list[list[int]]:
    """Row numbers of each prompt, in the order in which the prompts come first."""
    groups: dict[str, list[int]] = {}
    prompts = dataset.select_columns(["prompt"])
    for rows in data.chunks(range(len(dataset)), "Reading prompts", " samples"):
        for row, prompt in zip(rows, prompts[list(rows)]["prompt"], strict=True):
            # As JSON: message lists are no dictionary keys.
            groups.setdefault(json.dumps(prompt, sort_keys=True, default=str), []).append(row)
    return list(groups.values())


def scored_groups(
    dataset: "Dataset", groups: Sequence[Sequence[int]], rules: data.Scorer, column: str, listed: bool
) -> Iterator[list[Scored]]:
    """Score the samples of several groups of rows in one call of the rules; yields the samples of each group."""
    rows = [row for group in groups for row in group]
    batch = dataset[rows]
    found = zip(batch[column], rows, strict=True)
    cells = [sample_list(cell, column, row) if listed else [cell] for cell, row in found]
    positions = [position for position, cell in enumerate(cells) for _ in cell]
    samples = [sample for cell in cells for sample in cell]
    columns = data.rule_columns({name: values for name, values in batch.items() if name != column}, positions)
    totals = data.scores(rules, [batch["prompt"][position] for position in positions], samples, columns, rows)
    of_row: dict[int, list[Scored]] = {row: [] for row in rows}
    for position, sample, total in zip(positions, samples, totals, strict=True):
        of_row[rows[position]].append((rows[position], sample, total))
    return ([scored for row in group for scored in of_row[row]] for group in groups)


def sample_list(cell: Any, column: str, row: int) -> list[Any]:
    """The samples of one cell, or DataError where it holds a single one. A missing list has no samples."""
    if cell is None:
        return []
    if not isinstance(cell, list) or any(isinstance(item, Mapping) for item in cell):
        raise DataError(
            f"Row {row} holds a single sample in '{column}'. Give a list of samples, or name the column 'completion' "
            "where each row holds one."
        )
    return cell


def usable(scored: Sequence[Scored], length: Callable[[str], float], tally: Counter[str]) -> list[Sample]:
    """The samples with a score and a text; the others are counted in `tally`."""
    samples = [(row, completion, completion_text(completion), score) for row, completion, score in scored]
    tally["num_samples"] += len(samples)
    tally["num_unscored"] += sum(score is None for *_, score in samples)
    tally["num_blank"] += sum(score is not None and not text.strip() for *_, text, score in samples)
    return [
        Sample(row, completion, text, measured(length, text), score)
        for row, completion, text, score in samples
        if score is not None and text.strip()
    ]


def measured(length: Callable[[str], float], text: str) -> float:
    """The length of a text, or ConfigError for what is no length, such as a tokenizer's list of ids."""
    value = length(text)
    if isinstance(value, Real) and value >= 0:
        return value
    example = "lambda text: len(tokenizer.encode(text))"
    raise ConfigError(f"length gave a {type(value).__name__} for a text. Give a function to a number: {example}.")


def pair_dataset(dataset: "Dataset", pairs: Sequence[Pair], column: str, names: Sequence[str]) -> "Dataset":
    """The pairs as rows; what belongs to the prompt comes from the row of the chosen sample, types kept."""
    from datasets import Dataset, concatenate_datasets

    sides = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    texts = ([sample.completion for sample in side] for side in sides)
    totals = ([sample.score for sample in side] for side in sides)
    gaps = [pair.gap for pair in pairs]
    values = (*texts, *totals, gaps, gaps)
    made = Dataset.from_dict(dict(zip(names, values, strict=False)))
    kept = dataset.remove_columns([column]).select([pair.chosen.row for pair in pairs]).flatten_indices()
    others = [name for name in kept.column_names if name != "prompt"]
    return concatenate_datasets([kept, made], axis=1).select_columns(["prompt", *made.column_names, *others])

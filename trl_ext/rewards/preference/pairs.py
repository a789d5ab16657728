"""Make preference pairs for a reward model from several scored samples per prompt.

The samples of a pair have about the same length, because a reward model learns length wherever length gives the better
side away. Left out: pairs across prompts, ties, and the choice of the best and the worst sample only (which are
often the longest and the shortest).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.preference.choice import Pair, PairLimits, Sample, choose_pairs
from trl_ext.rewards.preference.data import Scorer, checked_dataset, chunks, rule_columns, scores
from trl_ext.rewards.preference.reports import PairReport, no_pair_message
from trl_ext.rewards.rows import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

Scored = tuple[int, Any, float | None]  # Row in the dataset, completion as it is there, the rules' total.

_MADE_COLUMNS = ("chosen", "rejected", "chosen_score", "rejected_score", "rule_gap")


def build_pairs(
    dataset: "Dataset",
    rules: Scorer,
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
        `pairs, report = build_pairs(samples, RuleSet([Answer()]))`, and `print(report)` shows

        prompts      267  29 without a pair
        samples     1066  0 without a score, 0 blank
        refused     1018  711 too close in score, 307 too unlike in length
        pairs        282  mean length 279.9 chosen, 277.1 rejected
    """
    limits = PairLimits(min_gap, max_length_ratio, max_pairs_per_prompt)
    dataset = checked_dataset(dataset, (("prompt", completions), ("prompt", "completion")))
    taken = [name for name in made_columns(margin) if name in dataset.column_names]
    if taken:
        raise DataError(
            f"The dataset already has the columns {', '.join(taken)}, which build_pairs makes. Rename or remove them."
        )
    column = completions if completions in dataset.column_names else "completion"
    listed = column == completions
    groups = [[row] for row in range(len(dataset))] if listed else rows_by_prompt(dataset)
    tally, pairs = Counter(num_prompts=len(groups)), list[Pair]()
    for part in chunks(groups, "Scoring samples", " prompts"):
        for scored in scored_groups(dataset, part, rules, column, listed):
            found = choose_pairs(usable(scored, length or len, tally), limits, tally)
            tally["num_prompts_without_pair"] += not found
            pairs += found
    if not pairs:
        raise DataError(no_pair_message(tally, limits))
    return pair_dataset(dataset, pairs, column, margin), PairReport.of(tally, pairs)


def made_columns(margin: bool) -> tuple[str, ...]:
    """Names of the columns that `build_pairs` makes."""
    return (*_MADE_COLUMNS, "margin") if margin else _MADE_COLUMNS


def rows_by_prompt(dataset: "Dataset") -> list[list[int]]:
    """Row numbers of each prompt, in the order in which the prompts come first."""
    groups: dict[str, list[int]] = {}
    prompts = dataset.select_columns(["prompt"])
    for rows in chunks(range(len(dataset)), "Reading prompts", " samples"):
        for row, prompt in zip(rows, prompts[list(rows)]["prompt"], strict=True):
            # As JSON: message lists are no dictionary keys.
            groups.setdefault(json.dumps(prompt, sort_keys=True, default=str), []).append(row)
    return list(groups.values())


def scored_groups(
    dataset: "Dataset", groups: Sequence[Sequence[int]], rules: Scorer, column: str, listed: bool
) -> Iterator[list[Scored]]:
    """Score the samples of several groups of rows in one call of the rules; yields the samples of each group."""
    rows = [row for group in groups for row in group]
    batch = dataset[rows]
    cells = [
        sample_list(cell, column, row) if listed else [cell] for cell, row in zip(batch[column], rows, strict=True)
    ]
    positions = [position for position, cell in enumerate(cells) for _ in cell]
    samples = [sample for cell in cells for sample in cell]
    columns = rule_columns({name: values for name, values in batch.items() if name != column}, positions)
    totals = scores(rules, [batch["prompt"][position] for position in positions], samples, columns, rows)
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
    raise ConfigError(
        f"length gave a {type(value).__name__} for a text. Give a function from text to a number, such as "
        "lambda text: len(tokenizer.encode(text))."
    )


def pair_dataset(dataset: "Dataset", pairs: Sequence[Pair], column: str, margin: bool) -> "Dataset":
    """The pairs as rows; what belongs to the prompt comes from the row of the chosen sample, types kept."""
    from datasets import Dataset, concatenate_datasets

    gaps = [pair.gap for pair in pairs]
    values = (
        [pair.chosen.completion for pair in pairs],
        [pair.rejected.completion for pair in pairs],
        [pair.chosen.score for pair in pairs],
        [pair.rejected.score for pair in pairs],
        gaps,
        gaps,
    )
    made = Dataset.from_dict(dict(zip(made_columns(margin), values, strict=False)))
    kept = dataset.remove_columns([column]).select([pair.chosen.row for pair in pairs]).flatten_indices()
    others = [name for name in kept.column_names if name != "prompt"]
    return concatenate_datasets([kept, made], axis=1).select_columns(["prompt", *made.column_names, *others])

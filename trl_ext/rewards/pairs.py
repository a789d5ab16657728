r"""Preference pairs in any of TRL's four formats: gaps between the rules' totals of their two sides, and a filter.

The filter drops pairs that teach a reward model nothing, or something wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError, RuleError
from trl_ext.rewards.base.rows import completion_text
from trl_ext.rewards.base.rule import is_finite
from trl_ext.rewards.split_pairs import bare, split_batch

if TYPE_CHECKING:
    from datasets import Dataset

# A RuleSet, one column of `RuleSet.split()`, or any other callable that returns one total per completion.
Scorer = Callable[..., list[float | None]]

PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))

_CHUNK_ROWS = 256  # in memory as Python objects at one time, and one step of the progress bar
_BAR_DELAY_S = 2.0
# Keyword arguments of TRL's call, and columns that would show a rule the answer. TRL, too, withholds the first three.
_NOT_FOR_RULES = frozenset(
    {"prompt", "completion", "completion_ids", "prompts", "completions", "chosen", "rejected", "log_metric"}
)

_REASONS = ("empty", "identical", "different_prompt", "contradicted")
# Totals are sums of weighted values: 0.7 - 0.2 is slightly below 0.5, and equal verdicts may differ in the last bit.
_ROUNDING = 1e-9


def checked_pairs(dataset: Any) -> "Dataset":
    """Return a dataset of pairs with plain Python values; DataError without rows or without the columns of pairs."""
    from datasets import Dataset  # Here, so that rules do not need it.

    if not isinstance(dataset, Dataset):
        raise DataError(f"The dataset is a {type(dataset).__name__}. Give a datasets.Dataset: one split, no stream.")
    if not any(set(columns) <= set(dataset.column_names) for columns in PAIR_COLUMNS):
        wanted = " or ".join(f"({', '.join(columns)})" for columns in PAIR_COLUMNS)
        there = ", ".join(dataset.column_names) or "none"
        raise DataError(f"The dataset needs the columns {wanted}; its columns are: {there}. Rename its columns.")
    if len(dataset) == 0:
        raise DataError("The dataset has no rows. Give at least one row.")
    return dataset.with_format(None)


def chunks(items: Sequence[Any], task: str, unit: str) -> Iterator[Sequence[Any]]:
    """Yield slices of `items`, with a progress bar that appears only if the work takes long."""
    from datasets.utils.tqdm import tqdm

    with tqdm(total=len(items), desc=task, unit=unit, delay=_BAR_DELAY_S) as bar:
        for start in range(0, len(items), _CHUNK_ROWS):
            chunk = items[start : start + _CHUNK_ROWS]
            yield chunk
            bar.update(len(chunk))


def rule_gaps(dataset: "Dataset", rules: Scorer, rows: Sequence[int] | None = None) -> list[float | None]:
    """Return the total of the chosen side minus the total of the rejected side per row; None if a total is missing.

    `dataset` has explicit or implicit prompts, text or messages, and the columns that rules read. `rows` are the
    numbers of the rows to score, by default all. An error names the rows where it arose.
    """
    dataset = checked_pairs(dataset)
    if not callable(rules):
        raise ConfigError(f"rules is {rules!r}. Give a RuleSet, such as RuleSet([Answer()]).")
    gaps: list[float | None] = []
    for part in chunks(range(len(dataset)) if rows is None else rows, "Scoring pairs", " pairs"):
        batch = dataset[list(part)]
        pairs = split_batch(batch)
        # One call of the rules: all chosen sides, then all rejected sides.
        prompts = [pair.prompts[side] for side in (0, 1) for pair in pairs]
        completions = [pair.completions[side] for side in (0, 1) for pair in pairs]
        columns = {name: [*cells, *cells] for name, cells in batch.items() if name not in _NOT_FOR_RULES}
        try:
            totals = list(rules(prompts=prompts, completions=completions, **columns))
        except RuleError as error:
            where = f"rows {min(part)} to {max(part)} of the dataset (the samples counted from there)"
            raise RuleError(f"While scoring {where}: {error}") from error
        sides = zip(totals[: len(pairs)], totals[len(pairs) :], strict=True)
        gaps += [None if best is None or worst is None else best - worst for best, worst in sides]
    return gaps


# The filter ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilterReport:
    """The report of `filter_pairs`: the number of dropped rows by reason. `print(report)` shows them.

    A row is counted once, under the first reason that applies. `unscored` rows are kept. `first_rows` maps each reason
    (and `unscored`) to the numbers, from 0, of its first three rows in the original dataset.
    """

    total: int
    kept: int
    empty: int
    identical: int
    different_prompt: int
    contradicted: int
    unscored: int
    first_rows: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{field.name:24} {getattr(self, field.name)}" for field in fields(self))


def filter_pairs(
    dataset: "Dataset", rules: Scorer | None = None, *, min_gap: float = 0.0, margin: bool = False
) -> tuple["Dataset", FilterReport]:
    """Drop pairs that cannot be compared, and pairs that the rules contradict.

    A row is dropped for the first reason that applies. Rows that the rules cannot judge are kept (`unscored`).

        empty             a side is missing or blank, or (implicit prompt in plain text) one side is, without blank
                          ends, the beginning of the other
        identical         both sides are the same, without blank ends
        different_prompt  implicit prompts differ (`rewards.pairs` says how sides are split), or plain texts have no
                          common beginning
        contradicted      the rules' total is not at least `min_gap` higher for the chosen side

    Args:
        dataset: Columns (prompt, chosen, rejected) or (chosen, rejected), text or messages, and columns for the rules.
        rules: A RuleSet, or None to compare only the texts.
        min_gap: Least difference of the rules' totals, at least 0.
        margin: Add the column `margin`, which TRL's reward loss subtracts: the gap, or 0.0 if it is negative or
            unknown.

    Returns:
        The remaining rows, with rules also the column `rule_gap` (None if unscored), and the report.

    Raises:
        DataError: Columns are missing, or no row is left.
        ConfigError: min_gap is negative or not finite, or min_gap or margin is set without rules.

    Examples:
        `pairs, report = filter_pairs(dataset, RuleSet([Answer()]))`, then `report.kept, report.contradicted`.
    """
    _check_scores(rules, min_gap, margin)
    dataset = checked_pairs(dataset)
    reasons = pair_faults(dataset)
    sound = [row for row, reason in enumerate(reasons) if reason is None]
    gaps = {} if rules is None else dict(zip(sound, rule_gaps(dataset, rules, sound), strict=True))
    for row, gap in gaps.items():
        if gap is not None and gap < min_gap - _ROUNDING:
            reasons[row] = "contradicted"
    kept = [row for row, reason in enumerate(reasons) if reason is None]
    report = _count(reasons, [row for row, gap in gaps.items() if gap is None])
    if not kept:
        most = max(_REASONS, key=lambda reason: getattr(report, reason))
        advice = {
            "contradicted": f"Lower min_gap (now {min_gap:g}), or see whether chosen and rejected are swapped.",
            "different_prompt": "Give each pair's prompt once, in a column 'prompt'.",
        }.get(most, "Look at the rows named here, and at how they were made.")
        raise DataError(f"Not one of the {report.total} pairs is left; most are '{most}'. {advice}\n{report}")
    if rules is not None:
        dataset = with_gaps(dataset, [gaps.get(row) for row in range(len(dataset))], margin)
    return dataset.select(kept), report


def _check_scores(rules: Scorer | None, min_gap: float, margin: bool) -> None:
    """Raise ConfigError for an impossible gap, and for a gap or margin without rules."""
    if not is_finite(min_gap) or min_gap < 0:
        raise ConfigError(f"min_gap is {min_gap!r}. Give a finite number of at least 0.")
    if rules is None and (margin or min_gap > 0):
        raise ConfigError(f"margin={margin} and min_gap={min_gap} ask for scores, but there are no rules. Give rules.")


def _count(reasons: list[str | None], unscored: list[int]) -> FilterReport:
    """Count the rows by their reason; None is a kept row, `unscored` are numbers of such rows."""
    rows: dict[str, list[int]] = {reason: [] for reason in _REASONS}
    for row, reason in enumerate(reasons):
        if reason is not None:
            rows[reason].append(row)
    rows["unscored"] = unscored
    counts = {reason: len(found) for reason, found in rows.items()}
    first = {reason: tuple(found[:3]) for reason, found in rows.items()}
    return FilterReport(total=len(reasons), kept=reasons.count(None), first_rows=first, **counts)


def pair_faults(dataset: "Dataset") -> list[str | None]:
    """Return the reason why the two texts of each row cannot be compared, or None if they can."""
    texts = dataset.select_columns([name for name in PAIR_COLUMNS[0] if name in dataset.column_names])
    implicit = "prompt" not in texts.column_names
    faults: list[str | None] = []
    for rows in chunks(range(len(texts)), "Reading pairs", " pairs"):
        batch = texts[list(rows)]
        sides = zip(batch["chosen"], batch["rejected"], split_batch(batch), strict=True)
        for chosen, rejected, pair in sides:
            is_empty = any(map(is_blank, pair.completions))
            if not is_empty and implicit and isinstance(chosen, str):
                # Read by characters: "1" is the beginning of "18".
                short, long = sorted((chosen.rstrip(), rejected.rstrip()), key=len)
                is_empty = short != long and long.startswith(short)
            if is_empty or bare(chosen) == bare(rejected):
                faults.append("empty" if is_empty else "identical")
            else:
                faults.append(None if pair.same_prompt else "different_prompt")
    return faults


def is_blank(completion: Any) -> bool:
    """Return True for a completion without text and without tool calls."""
    if isinstance(completion, list) and any(message.get("tool_calls") for message in completion):
        return False
    return not completion_text(completion).strip()


def with_gaps(pairs: "Dataset", gaps: Sequence[float | None], margin: bool) -> "Dataset":
    """Add `rule_gap` and, if wanted, `margin` to the pairs; columns of these names are replaced."""
    from datasets import Dataset, Features, Value, concatenate_datasets

    columns: dict[str, list[float | None]] = {"rule_gap": list(gaps)}
    if margin:
        columns["margin"] = [max(gap or 0.0, 0.0) for gap in gaps]
    # With explicit types, because a column of None has no type.
    features = Features({name: Value("float64") for name in columns})
    rest = pairs.remove_columns([name for name in columns if name in pairs.column_names])
    return concatenate_datasets([rest, Dataset.from_dict(columns, features=features)], axis=1)

"""Drop preference pairs that teach a reward model nothing, or something wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.base.rows import completion_text
from trl_ext.rewards.preference.gaps import PAIR_COLUMNS, Scorer, bare, checked_pairs, chunks, rule_gaps, split_batch

if TYPE_CHECKING:
    from datasets import Dataset

_REASONS = ("empty", "identical", "different_prompt", "contradicted")
_MAX_ROWS_NAMED = 3
# Totals are sums of weighted values: 0.7 - 0.2 is slightly below 0.5, and equal verdicts may differ in the last bit.
_ROUNDING = 1e-9


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

    @classmethod
    def of(cls, reasons: Sequence[str | None], unscored: Sequence[int]) -> "FilterReport":
        """Make the report from one reason or None per row, and the numbers of the rows without a score."""
        rows = {reason: [row for row, given in enumerate(reasons) if given == reason] for reason in _REASONS}
        rows["unscored"] = list(unscored)
        counts = {reason: len(found) for reason, found in rows.items()}
        first = {reason: tuple(found[:_MAX_ROWS_NAMED]) for reason, found in rows.items()}
        return cls(total=len(reasons), kept=reasons.count(None), first_rows=first, **counts)

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
        different_prompt  implicit prompts differ (`gaps` describes how sides are split), or plain texts have no
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
    if isinstance(min_gap, bool) or not isinstance(min_gap, int | float) or not isfinite(min_gap) or min_gap < 0:
        raise ConfigError(f"min_gap is {min_gap!r}. Give a finite number of at least 0.")
    if rules is None and (margin or min_gap > 0):
        raise ConfigError(f"margin={margin} and min_gap={min_gap} ask for scores, but there are no rules. Give rules.")
    dataset = checked_pairs(dataset)
    reasons = pair_faults(dataset)
    sound = [row for row, reason in enumerate(reasons) if reason is None]
    gaps = {} if rules is None else dict(zip(sound, rule_gaps(dataset, rules, sound), strict=True))
    for row, gap in gaps.items():
        if gap is not None and gap < min_gap - _ROUNDING:
            reasons[row] = "contradicted"
    report = FilterReport.of(reasons, [row for row, gap in gaps.items() if gap is None])
    kept = [row for row, reason in enumerate(reasons) if reason is None]
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

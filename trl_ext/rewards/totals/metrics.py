"""What is counted of a batch, rule by rule: metrics and trace in TRL's log, and rows without a value.

All ranks log the same keys in every call. A rule without a value for a row is left out of the row's total. If it has
no value for any row, only the other rules are optimised, such as length instead of right answers.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.rewards.base.rows import is_null
from trl_ext.rewards.base.rule import Rule
from trl_ext.rewards.totals.composition import Composed, Part, shortened
from trl_ext.rewards.totals.scorer import Column

LogMetric = Callable[..., None]

_MOST_MET = 100  # series of criteria; a column may hold any number of tags
_TRACE_CHARS = 200  # of a detail or a cell: every rank sends them for its whole batch


def log_rule(log_metric: LogMetric, rule: Rule, column: Column, states: Sequence[str]) -> None:
    """Log one rule's metrics over a batch, from its values before weight and gate.

    rewards/<rule>/mean and std are TRL's keys; they are missing if no row has a value. Under rules/<rule>/ are shares
    of rows: none_frac without a value; no_answer_frac without anything to judge; undecided_frac with a gold that the
    rule cannot compare; timeout_frac that were too long or too complex, took too long or crashed; error_frac in which
    the rule, the machine or a server failed; not_finite_frac; skipped_frac by `when`; gated_frac with a gate that was
    not open; cache_frac with a known verdict. p95_ms is the time within which 95 % of the other rows were judged. An
    AsyncRule adds latency_s, the mean seconds of a call, and the batch's calls, retries and tokens; a rubric met_frac,
    the share of met criteria, and met/<title or tag>. Our trainers log a share from the first value other than 0.

    Args:
        log_metric: Receives a name and a number; an evaluation's receives the number of rows, too.
        rule: The rule.
        column: Its verdicts on the batch.
        states: State of its gate by row: "open", "shut" or "unknown".
    """
    # An evaluation averages over rows: it has the number of rows that count, and takes the number of a value.
    num_rows = getattr(log_metric, "num_rows", None)
    verdicts = column.verdicts[:num_rows]
    if not verdicts:
        return
    rows = len(verdicts)
    known = [verdict.value for verdict in verdicts if verdict.value is not None]
    if known:
        weight = () if num_rows is None else (len(known),)
        log_metric(f"rewards/{rule.name}/mean", sum(known) / len(known), *weight)
        log_metric(f"rewards/{rule.name}/std", statistics.pstdev(known), *weight)
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1

    def share(*statuses: str) -> float:
        return sum(counts.get(status, 0) for status in statuses) / rows

    metrics = {
        # In whole rows: 1 - 5/6 - 1/6 is not 0.
        "none_frac": (rows - len(known) - counts.get("skipped", 0)) / rows,
        "no_answer_frac": share("no_answer"),
        "undecided_frac": share("undecided"),
        "timeout_frac": share("timeout", "too_long", "too_complex", "crashed"),
        "error_frac": share("error", "infra_error", "refused", "no_score"),
        "not_finite_frac": share("not_finite"),
        "skipped_frac": share("skipped"),
        "cache_frac": column.hits / rows,
        "p95_ms": percentile(column.ms, 0.95),
        **column.costs,
    }
    met: dict[str, list[bool]] = {}
    for _, is_met, labels in (part for verdict in verdicts for part in verdict.parts):
        for name in ("met_frac", *(f"met/{label}" for label in labels)):
            met.setdefault(name, []).append(is_met)
    metrics |= {name: statistics.fmean(met[name]) for name in sorted(met, reverse=True)[:_MOST_MET]}  # met_frac first
    if rule.gate is not None:
        metrics["gated_frac"] = sum(state != "open" for state in states) / rows
    for name, value in metrics.items():
        log_metric(f"rules/{rule.name}/{name}", value)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def traces(rules: Sequence[Rule], columns: Sequence[Column], composed: Sequence[Composed]) -> list[str]:
    """Return JSON of each rule's value, status, contribution and detail per row: a column of TRL's completions."""
    texts = []
    for row, *verdicts in zip(composed, *(column.verdicts for column in columns), strict=True):
        cells = {}
        for rule, verdict, state, adds in zip(rules, verdicts, row.states, row.contributions, strict=True):
            detail = Part.of(rule, verdict, state, adds).detail
            cells[rule.name] = [verdict.value, verdict.status, adds, trace_cell(detail)]
        texts.append(json.dumps(cells))
    return texts


def read_cells(rules: Sequence[Rule], columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return JSON of the dataset's cells that the rules read, shortened, per row: a column of the same table."""
    names = list(dict.fromkeys(name for rule in rules for name in rule.all_columns))
    rows = zip(*(columns[name] for name in names), strict=True)
    return [json.dumps(dict(zip(names, map(_shown, row), strict=True)), default=str) for row in rows]


def _shown(cell: Any) -> Any:
    text = str(cell).rstrip()
    if len(text) <= _TRACE_CHARS:
        return text if isinstance(cell, str) else cell
    return f"{trace_cell(text).removesuffix('...')[: _TRACE_CHARS - 3]}..."


def trace_cell(text: str) -> str:
    return shortened(text[: 2 * _TRACE_CHARS], _TRACE_CHARS)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one rule's rows with and without a value; it adds up over batches and ranks."""

    num_rows: int = 0  # without the rows that the rule's `when` excludes
    num_scored: int = 0  # rows with a value
    num_null: int = 0  # rows without a value in which a column that the rule reads is null or NaN
    num_covered: int = 0  # rows without a value that another rule judged right or wrong
    reason: str = ""  # status and detail of the first row without a value

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.num_rows + other.num_rows,
            self.num_scored + other.num_scored,
            self.num_null + other.num_null,
            self.num_covered + other.num_covered,
            self.reason or other.reason,
        )

    @property
    def num_unscored(self) -> int:
        return self.num_rows - self.num_scored

    @property
    def scored_nothing(self) -> bool:
        return self.num_rows > 0 == self.num_scored

    def why(self, rule: Rule) -> str:
        if 0 < self.num_null == self.num_unscored:
            return f"{' or '.join(repr(name) for name in rule.columns)} is null or NaN in all of these rows"
        return f"the reason of the first such row: {self.reason}"


def tally(position: int, rules: Sequence[Rule], found: Sequence[Column], columns: Mapping[str, Any]) -> Tally:
    """Count the rows of a batch for a rule, by the verdicts of all rules.

    Args:
        position: Place of the rule in the set.
        rules: All rules of the set.
        found: Their verdicts on the batch, in the same order.
        columns: Dataset columns by name, a cell per row.
    """
    rule, verdicts = rules[position], found[position].verdicts
    is_for = [index for index, verdict in enumerate(verdicts) if verdict.status != "skipped"]
    unscored = [index for index in is_for if verdicts[index].value is None]
    others = [column for other, column in zip(rules, found, strict=True) if other.judges_correctness]
    first = verdicts[unscored[0]] if unscored else None
    num_null = num_covered = 0
    for index in unscored:
        num_null += any(is_null(columns[name][index]) for name in rule.columns)
        num_covered += any(other.verdicts[index].value is not None for other in others)
    return Tally(
        num_rows=len(is_for),
        num_scored=len(is_for) - len(unscored),
        num_null=num_null,
        num_covered=num_covered,
        reason="" if first is None else f"{first.status}: {first.detail or 'no value'}",
    )

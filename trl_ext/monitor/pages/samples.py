"""Completions worth reading, from the tables that TRL writes with `log_completions`.

Columns of a table: step, prompt, completion, one for each reward function, advantage, and those of our rules:
    rule_trace      JSON: each rule's value, status, contribution to the total, and detail
    rule_columns    JSON: the dataset's cells that the rules read, the gold answer among them
"""

import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPLETIONS_FOLDER = "completions"
MOST_TABLES = 40  # that are read: the first, the last, and others evenly between
PER_GROUP = 2
# Columns that are no reward function's.
_OTHERS = frozenset({"step", "prompt", "completion", "advantage", "rule_trace", "rule_columns", "image"})


@dataclass(frozen=True, slots=True)
class RulePart:
    """A rule's line of an explanation; None and "" where the table does not say."""

    rule: str
    value: float | None
    status: str = ""
    adds: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion with what it earned and why.

    Args:
        step: Optimizer step of the table.
        prompt, completion: As text, whole.
        total: Weighted sum of the reward functions; None where nothing scored it.
        advantage: As logged.
        gold: The dataset's cells that the rules read.
        parts: One for each rule.
    """

    step: int
    prompt: str
    completion: str
    total: float | None
    advantage: float | None
    gold: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[RulePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """Completions by what makes them worth reading, and how many tables they were chosen from.

    Args:
        groups: Heading, and its completions.
        num_read, num_tables: Tables that were read, and tables that are there.
        damaged: Names of tables that could not be read.
    """

    groups: Mapping[str, Sequence[ShownCompletion]]
    num_read: int = 0
    num_tables: int = 0
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    row: int
    step: int
    total: float | None
    parts: tuple[RulePart, ...]


def read_samples(folder: Path, reward_names: Collection[str], weights: Sequence[float] | None = None) -> Samples:
    """Choose from a run's tables the first, the last, the best, the worst and the most disputed completions.

    Args:
        folder: The run's.
        reward_names: Reward functions by the log's metrics; other columns of numbers are not counted.
        weights: Of the reward functions, 1 each if None.
    """
    paths = sorted(
        (folder / COMPLETIONS_FOLDER).glob("completions_*.parquet"), key=lambda path: (len(path.name), path)
    )
    candidates: list[_Candidate] = []
    damaged = []
    chosen_paths = evenly(paths, MOST_TABLES)
    for path in chosen_paths:
        try:
            candidates += _candidates(path, reward_names, weights)
        except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are ValueErrors or OSErrors
            damaged.append(f"{path.name}: {' '.join(str(error).split())[:200]}")
    groups = {name: [_shown(one) for one in chosen] for name, chosen in _chosen(candidates).items() if chosen}
    return Samples(groups, len(chosen_paths), len(paths), tuple(damaged))


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, the first and the last among them, at equal distances."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _candidates(path: Path, reward_names: Collection[str], weights: Sequence[float] | None) -> Iterator[_Candidate]:
    import pyarrow.parquet as parquet

    names = [name for name in parquet.read_schema(path).names if name not in ("prompt", "completion", "image")]
    columns = parquet.read_table(path, columns=names).to_pydict()
    rewards = [name for name in names if name not in _OTHERS and name in reward_names]
    factors = weights if weights and len(weights) == len(rewards) else [1.0] * len(rewards)
    for row in range(len(columns["step"])):
        values = {name: finite(columns[name][row]) for name in rewards}
        known = [factor * value for factor, value in zip(factors, values.values(), strict=True) if value is not None]
        trace = json_mapping(columns.get("rule_trace", {row: None})[row])
        parts = trace_parts(trace) or tuple(RulePart(name, value) for name, value in values.items())
        yield _Candidate(path, row, int(columns["step"][row]), math.fsum(known) if known else None, parts)


def _chosen(candidates: Sequence[_Candidate]) -> dict[str, list[_Candidate]]:
    """The groups, each completion in one of them; of equal ones the latest."""
    if not candidates:
        return {}
    scored = [one for one in candidates if one.total is not None]
    latest_first = scored[::-1]
    disputed = [one for one in latest_first if _dispute(one) > (False, 0.0, 0.0)]
    first = [one for one in candidates if one.path == candidates[0].path]
    last = [one for one in candidates if one.path == candidates[-1].path]
    orders = {
        "First": [first[0], first[len(first) // 2]],
        "Last": [last[0], last[len(last) // 2]],
        "Best": sorted(latest_first, key=lambda one: -(one.total or 0.0)),
        "Worst": sorted(latest_first, key=lambda one: one.total or 0.0),
        "Most disputed between rules": sorted(disputed, key=_dispute, reverse=True),
    }
    taken: set[tuple[Path, int]] = set()
    groups = {}
    for name, order in orders.items():
        # The first that are not taken, of different tables as far as there are some among the next hundred.
        free = [one for one in order if (one.path, one.row) not in taken][:100]
        by_table: dict[Path, _Candidate] = {}
        for one in free:
            by_table.setdefault(one.path, one)
        groups[name] = (list(by_table.values()) if len(by_table) >= PER_GROUP else free)[:PER_GROUP]
        taken |= {(one.path, one.row) for one in groups[name]}
    return groups


def _dispute(one: _Candidate) -> tuple[bool, float, float]:
    """How far apart the rules are: some give and some take away, then the widest range, then the widest spread."""
    # A rule that takes away from the total counts as negative.
    known = [(part.value, part.adds or 0.0) for part in one.parts if part.value is not None]
    values = [-value if value * adds < 0 else value for value, adds in known]
    if len(values) < 2:
        return False, 0.0, 0.0
    return min(values) < 0 < max(values), max(values) - min(values), statistics.pstdev(values)


def _shown(one: _Candidate) -> ShownCompletion:
    import pyarrow.parquet as parquet

    table = parquet.read_table(one.path)
    row = {name: table.column(name)[one.row].as_py() for name in table.column_names if name != "image"}
    gold = {str(name): str(cell) for name, cell in json_mapping(row.get("rule_columns")).items()}
    texts = conversation_text(row.get("prompt")), conversation_text(row.get("completion"))
    return ShownCompletion(one.step, *texts, one.total, finite(row.get("advantage")), gold, one.parts)


def conversation_text(value: Any) -> str:
    """A prompt or completion as text: a lone message by its content, several with their roles."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return str(value)
    messages = [message for message in value if isinstance(message, dict)]
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return _content(messages[0].get("content"))
    parts = []
    for message in messages:
        calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
        texts = [f"[{message.get('role', '?')}]", _content(message.get("content")), *calls]
        parts.append("\n".join(filter(None, texts)))
    return "\n\n".join(parts)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "[image]") if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def trace_parts(trace: Mapping[str, Any]) -> tuple[RulePart, ...]:
    """The lines of a trace; those that are no list as we write it are left out."""
    found = []
    for rule, cells in trace.items():
        if isinstance(cells, list) and len(cells) >= 3:
            detail = str(cells[3]) if len(cells) > 3 else ""
            found.append(RulePart(rule, finite(cells[0]), str(cells[1]), finite(cells[2]), detail))
    return tuple(found)


def json_mapping(text: Any) -> dict[str, Any]:
    """The mapping of a JSON text, empty for anything else."""
    try:
        content = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(value: Any) -> float | None:
    """The value as a float, None unless it is a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None

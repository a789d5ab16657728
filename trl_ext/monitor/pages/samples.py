"""Completions worth reading, from the tables that TRL writes with `log_completions`, or from the few that are kept.

Columns of a table of TRL's: step, prompt, completion, one for each reward function, advantage, and for our rules
    rule_trace      JSON: each rule's value, status, contribution to the total, and detail
    rule_columns    JSON: the dataset's cells that the rules read, the gold answer among them
"""

import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trl_ext.monitor.log_keys import finite

COMPLETIONS_FOLDER = "completions"
MOST_TABLES = 40  # to read: the first, the last, and others evenly between
PER_GROUP = 2
MOST_KEPT = 4  # completions of a step, without `log_completions`
# Columns other than reward functions.
_OTHERS = frozenset({"step", "prompt", "completion", "advantage", "rule_trace", "rule_columns", "image"})


@dataclass(frozen=True, slots=True)
class RulePart:
    """A rule's line of an explanation; None or "" for a value that the table lacks."""

    rule: str
    value: float | None
    status: str = ""
    adds: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion with its reward and the explanation.

    Args:
        step: Optimizer step of the table.
        total: Weighted sum of the reward functions; None if it has no reward.
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
    """Groups of completions worth reading.

    Args:
        groups: Completions by heading.
        num_read, num_tables: Numbers of tables that were read, and of all tables.
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
    """Choose the first, last, best, worst and most disputed completions from a run's tables.

    Args:
        reward_names: Reward functions in the log's metrics; other columns of numbers are not counted.
        weights: Weights of the reward functions; None for 1 each.
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
    groups = {}
    for name, chosen in _choose(candidates).items():
        if chosen:
            groups[name] = [_shown(one) for one in chosen]
    return Samples(groups, len(chosen_paths), len(paths), tuple(damaged))


class FewCompletions:
    """Keeps a few completions of a run's first and last logged step, where `log_completions` is off."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def keep(self, output_dir: Path, step: int, logs: Mapping[str, Any]) -> None:
        """Write a table of this step from TRL's `_logs`, and remove the table before unless it is the first.

        Raises OSError or ValueError if there can be no such table.
        """
        import pandas

        path = output_dir / COMPLETIONS_FOLDER / f"completions_{step:05d}.parquet"
        if path in self._paths:
            return
        columns = {
            "step": step,
            "prompt": list(map(conversation_text, logs["prompt"])),
            "completion": list(map(conversation_text, logs["completion"])),
            **logs["rewards"],
            **logs["extra"],
            "advantage": logs["advantages"],
        }
        table = pandas.DataFrame(columns)
        table = table.iloc[evenly(range(len(table)), MOST_KEPT)]
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)
        if len(self._paths) > 1:
            self._paths.pop().unlink(missing_ok=True)
        self._paths.append(path)


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items at equal distances, with the first and the last."""
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


def _choose(candidates: Sequence[_Candidate]) -> dict[str, list[_Candidate]]:
    """Return the groups; a completion is in one group, and the latest of equal completions is taken."""
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
        # The first completions that are not taken, from different tables if the next hundred have enough tables.
        free = [one for one in order if (one.path, one.row) not in taken][:100]
        by_table: dict[Path, _Candidate] = {}
        for one in free:
            by_table.setdefault(one.path, one)
        groups[name] = (list(by_table.values()) if len(by_table) >= PER_GROUP else free)[:PER_GROUP]
        taken |= {(one.path, one.row) for one in groups[name]}
    return groups


class _Dispute(NamedTuple):
    """A sort key for the disagreement of rules on a completion: whether their signs differ, then how far they are
    apart."""

    signs_differ: bool = False
    range: float = 0.0
    deviation: float = 0.0


def _dispute(one: _Candidate) -> _Dispute:
    """Return how much the rules disagree on a completion."""
    # The value of a rule that lowers the total counts as negative.
    known = [(part.value, part.adds or 0.0) for part in one.parts if part.value is not None]
    values = [-value if value * adds < 0 else value for value, adds in known]
    if len(values) < 2:
        return _Dispute()
    return _Dispute(min(values) < 0 < max(values), max(values) - min(values), statistics.pstdev(values))


def _shown(one: _Candidate) -> ShownCompletion:
    import pyarrow.parquet as parquet

    table = parquet.read_table(one.path)
    row = {name: table.column(name)[one.row].as_py() for name in table.column_names if name != "image"}
    gold = {str(name): str(cell) for name, cell in json_mapping(row.get("rule_columns")).items()}
    texts = conversation_text(row.get("prompt")), conversation_text(row.get("completion"))
    return ShownCompletion(one.step, *texts, one.total, finite(row.get("advantage")), gold, one.parts)


def conversation_text(value: Any) -> str:
    """Return a prompt or completion as text: the content of a single message, several messages with their roles."""
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
    """Return the lines of a trace; malformed lines are left out."""
    found = []
    for rule, cells in trace.items():
        if isinstance(cells, list) and len(cells) >= 3:
            detail = str(cells[3]) if len(cells) > 3 else ""
            found.append(RulePart(rule, finite(cells[0]), str(cells[1]), finite(cells[2]), detail))
    return tuple(found)


def json_mapping(text: Any) -> dict[str, Any]:
    """Return the mapping of a JSON text, empty for anything else."""
    try:
        content = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

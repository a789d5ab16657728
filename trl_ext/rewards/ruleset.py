"""Several rules as one reward function for TRL.

    total = clip(sum of weight * value over the rules whose gate is open)

A rule without a value (a gold answer that cannot be read) is left out of the sum; a row where no rule has a value is
None, and TRL leaves it out. Neither NaN nor infinity leaves this module. An exception in a rule ends the run with a
RuleError that names rule and row, because a silent 0.0 would train on it for days.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from trl_ext.errors import DataError, RuleError
from trl_ext.rewards.explanation import Explanation, Part
from trl_ext.rewards.gates import gate_chains, gate_state
from trl_ext.rewards.rows import dataset_columns, make_rows
from trl_ext.rewards.rule import Row, Rule, Verdict, check_name

# Largest value and contribution that is let through: TRL keeps rewards in float32 and squares them for the group's
# standard deviation, which overflows from about 1.8e19.
LARGEST = 1e15

LogMetric = Callable[[str, float], None]


@dataclass(slots=True)
class RuleSet:
    """Rules, composed: pass it to TRL as `reward_funcs`, or `rules.split()` for one column per rule.

    Args:
        rules: Rules with different names.
        clip: Lowest and highest total, or None.
        name: What TRL calls the reward: its metric is `rewards/<name>/mean`.

    Example:
        >>> rules = RuleSet([Answer(), Length(high=24, weight=0.1, gate="answer")])
        >>> rules(completions=["A: 18", "A: 17"], completion_ids=[[1, 2], [1, 2]], answer=["18", "18"])
        [1.1, 0.0]
    """

    rules: Sequence[Rule]
    clip: tuple[float, float] | None = None
    name: str = "rules"
    _gates: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.rules = checked_rules(self.rules)
        self.clip = checked_clip(self.clip)
        self._gates = gate_chains(self.rules)
        self.__name__ = self.name

    @property
    def __name__(self) -> str:
        """The name, where TRL looks for the name of a reward function. Not frozen, so that it can be set like one."""
        return self.name

    @__name__.setter
    def __name__(self, name: str) -> None:
        check_name("A rule set", name)
        if any(rule.name == name for rule in self.rules):
            raise RuleError(
                f"The set and one of its rules are both named '{name}' and would share a metric. Rename one."
            )
        self.name = name

    @property
    def columns(self) -> tuple[str, ...]:
        """Dataset columns that the rules read, each once."""
        return tuple(dict.fromkeys(column for rule in self.rules for column in rule.columns))

    def __call__(
        self, /, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """The total of each completion, in TRL's call: columns as lists, its own arguments among them or absent."""
        table = self._judge(prompts, completions, completion_ids, columns)
        parts = [self._contributions(verdicts) for verdicts in table]
        log_metric = columns.get("log_metric")
        if callable(log_metric) and table:
            self._log_means(log_metric, table)
            for position in range(len(self.rules)):
                self._log_shares(log_metric, table, position)
        return [self._total(contributions) for contributions in parts]

    def score(self, /, prompt: Any, completion: Any, completion_ids: Any = None, **columns: Any) -> float | None:
        """The total of one completion; columns are single values."""
        return self.explain(prompt, completion, completion_ids, **columns).total

    def explain(self, /, prompt: Any, completion: Any, completion_ids: Any = None, **columns: Any) -> Explanation:
        """How one completion's total comes about; prints as a table. Columns are single values."""
        lists = {name: [value] for name, value in columns.items()}
        ids = None if completion_ids is None else [completion_ids]
        verdicts = self._judge([prompt], [completion], ids, lists)[0]
        contributions = self._contributions(verdicts)
        rows = zip(self.rules, verdicts, self._states(verdicts), contributions, strict=True)
        parts = tuple(Part.of(rule, verdict, state, contribution) for rule, verdict, state, contribution in rows)
        return Explanation(parts, self._total(contributions), self.clip)

    def split(self) -> list["RuleColumn"]:
        """One callable per rule, for one TRL column each. With TRL's default reward weights they sum to the total."""
        if self.clip is not None:
            raise RuleError(f"clip={self.clip} bounds the sum, and split() has no sum. Build the set without clip.")
        return [RuleColumn(self._with_gates(position)) for position in range(len(self.rules))]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "RuleSet":
        """A set from `{"rules": [{"rule": "answer", "gold": "answer"}, ...], "clip": [-1, 1]}`."""
        from trl_ext.rewards.config import build_rules

        return cls(**build_rules(mapping))

    @classmethod
    def from_yaml(cls, path: str | Path) -> "RuleSet":
        """A set from a YAML file with the keys of `from_dict`; a ConfigError names the file and the line."""
        from trl_ext.rewards.config import load_rules

        return load_rules(path, cls)

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads; fields at their default are left out."""
        from trl_ext.rewards.config import describe_rules

        return describe_rules(self.rules, self.clip, self.name)

    def _judge(self, prompts: Any, completions: Any, ids: Any, extras: Mapping[str, Any]) -> list[list[Verdict]]:
        """Verdicts, one list per row and one entry per rule."""
        columns = dataset_columns(extras)
        require_columns(self.rules, columns)
        rows = make_rows(prompts, completions, ids, columns)
        return [[judge(rule, row, index) for rule in self.rules] for index, row in enumerate(rows)]

    def _states(self, verdicts: Sequence[Verdict]) -> list[str]:
        values = [verdict.value for verdict in verdicts]
        return [gate_state(values, chain) if chain else "open" for chain in self._gates]

    def _contributions(self, verdicts: Sequence[Verdict]) -> list[float | None]:
        """What each rule adds to the total; None for a rule that is left out."""
        rows = zip(self.rules, verdicts, self._states(verdicts), strict=True)
        return [contribution(rule.weight, verdict.value, state) for rule, verdict, state in rows]

    def _total(self, contributions: Sequence[float | None]) -> float | None:
        known = [part for part in contributions if part is not None]
        if not known:
            return None
        total = sum(known, 0.0)
        return total if self.clip is None else min(max(total, self.clip[0]), self.clip[1])

    def _log_means(self, log_metric: LogMetric, table: Sequence[Sequence[Verdict]]) -> None:
        """TRL's own key for a reward, per rule: the mean value, unweighted and ungated, where there is one."""
        for position, rule in enumerate(self.rules):
            values = [verdicts[position].value for verdicts in table]
            known = [value for value in values if value is not None]
            if known:
                log_metric(f"rewards/{rule.name}/mean", sum(known) / len(known))

    def _log_shares(self, log_metric: LogMetric, table: Sequence[Sequence[Verdict]], position: int) -> None:
        """Shares of rows (0 to 1) in which a rule gave no usable value or was gated; the same keys in every call."""
        name = self.rules[position].name
        column = [verdicts[position] for verdicts in table]
        log_metric(f"rules/{name}/none_frac", sum(verdict.value is None for verdict in column) / len(table))
        not_finite = sum(verdict.status == "not_finite" for verdict in column)
        log_metric(f"rules/{name}/not_finite_frac", not_finite / len(table))
        if self._gates[position]:
            gated = sum(self._states(verdicts)[position] != "open" for verdicts in table)
            log_metric(f"rules/{name}/gated_frac", gated / len(table))

    def _with_gates(self, position: int) -> "RuleSet":
        """The rules that gate the rule at `position`, and then that rule."""
        gates = [self.rules[gate] for gate in reversed(self._gates[position])]
        # A name that no rule has: the column is called after its rule, not after this set.
        return RuleSet([*gates, self.rules[position]], name=f"{self.name}.{self.rules[position].name}")


@dataclass(frozen=True, slots=True)
class RuleColumn:
    """One rule of a set as a reward function of its own, weighted and gated as in the set.

    TRL logs its mean under `rewards/<rule>/mean`, so here that is the mean of the weighted, gated value.
    """

    rules: RuleSet  # the gates, and last the rule itself

    @property
    def __name__(self) -> str:
        return self.rules.rules[-1].name

    @property
    def columns(self) -> tuple[str, ...]:
        """Dataset columns that the rule and its gates read."""
        return self.rules.columns

    def __call__(
        self, /, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """The rule's contribution for each completion."""
        table = self.rules._judge(prompts, completions, completion_ids, columns)
        log_metric = columns.get("log_metric")
        if callable(log_metric) and table:
            self.rules._log_shares(log_metric, table, len(self.rules.rules) - 1)
        return [self.rules._contributions(verdicts)[-1] for verdicts in table]


def judge(rule: Rule, row: Row, index: int) -> Verdict:
    """The rule's verdict on the row with a value that is a finite float or None."""
    try:
        verdict = rule.score(row)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"score() returned {verdict!r}, not a Verdict")
        value = None if verdict.value is None else float(verdict.value)
    except Exception as error:
        raise RuleError(raised_message(rule, row, index, error)) from error
    if value is None:
        return verdict
    if not (abs(value) <= LARGEST and abs(value * rule.weight) <= LARGEST):
        return Verdict(rule.floor, "not_finite", f"the rule gave {value}, weight {rule.weight}")
    return verdict if value is verdict.value else Verdict(value, verdict.status, verdict.detail)


def raised_message(rule: Rule, row: Row, index: int, error: Exception) -> str:
    """The sentence for an exception in a rule; it carries the place, which a pickled error would lose."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"Rule '{rule.name}' raised {type(error).__name__}: {error} (row {index}, {Path(place.filename).name} line "
        f"{place.lineno}). Completion: {row.text[:200]!r}. Columns: {', '.join(row.columns) or 'none'}. "
        "Mend the rule, or the row if its data is wrong."
    )


def contribution(weight: float, value: float | None, state: str) -> float | None:
    """What a value adds to the total behind a gate in this state."""
    if value is None or state == "unknown":
        return None
    return 0.0 if state == "shut" else weight * value


def require_columns(rules: Iterable[Rule], columns: Mapping[str, Any]) -> None:
    """DataError for the first column that a rule reads and the dataset lacks."""
    for rule in rules:
        for column in rule.columns:
            if column not in columns:
                there = ", ".join(sorted(columns)) or "none"
                raise DataError(
                    f"Rule '{rule.name}' reads the column '{column}', which the dataset lacks; its columns are: "
                    f"{there}. Rename a column, or tell the rule which to read."
                )


def checked_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules as a tuple, or RuleError for anything else than rules with different names."""
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise RuleError(f"A RuleSet takes a list of rules, not {rules!r}. Write RuleSet([...]).")
    rules = tuple(rules)
    if not rules:
        raise RuleError("A RuleSet without rules has nothing to score. Give it at least one rule.")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise RuleError(f"{rule!r} is not a rule. Give instances such as Answer(), or Call(f) for a function f.")
        if not rule.name:
            raise RuleError(f"{rule!r} has no name. Override check(), not __post_init__, to test its fields.")
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RuleError(f"Several rules are named {', '.join(twice)}. Give each its own: name='...'.")
    return rules


def checked_clip(clip: Any) -> tuple[float, float] | None:
    """The clip as a pair of numbers, or RuleError."""
    if clip is None:
        return None
    pair = list(clip) if isinstance(clip, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(bound, int | float) and isfinite(bound) for bound in pair):
        raise RuleError(f"clip is {clip!r}. Give two finite numbers, such as (-1, 1).")
    if pair[0] >= pair[1]:
        raise RuleError(f"clip is {clip!r}. Give the lower bound first.")
    return float(pair[0]), float(pair[1])

"""Several rules as one reward function for TRL.

    total = clip(sum of weight * value over the rules whose gate is open)

A rule without a value (a gold answer that cannot be read) is left out of the sum. If no rule has a value, the total is
None, and TRL ignores the row. Totals are never NaN or infinite. Rules that may hang or crash run in workers (`pool`).
An exception in a rule ends the run with a RuleError that names rule and row, because a run could train on a silent 0.0
for days; `on_error="floor"` continues instead.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from trl_ext.errors import DataError, RuleError
from trl_ext.rewards.base.rows import TRL_EXTRAS, dataset_columns, make_rows
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_name, check_set_key, ideal_of, pair_of
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.totals.composition import Composed, Composition, Explanation, contribution, outbid_warning
from trl_ext.rewards.totals.metrics import Tally, log_rule, read_cells, tally, traces
from trl_ext.rewards.totals.moments import Moments
from trl_ext.rewards.totals.scorer import Column, Early, Scorer, warn_once


@dataclass(slots=True)
class SharedBatch:
    """The batch that TRL passes to every column of a split set: its rows, and its verdicts so far.

    A batch is identified by its argument objects, which are referenced while it is open. If a column asks a second
    time, a new batch begins, because the caller may have changed the lists in place. Pickles as an empty batch.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    found: dict[str, Column] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedBatch, ()

    def columns(
        self,
        rules: Sequence[Rule],
        arguments: Mapping[str, Any],
        make: Callable[[], list[Row]],
        score: Callable[[Sequence[Rule], list[Row]], list[Column]],
    ) -> list[Column]:
        """Return the verdicts of a rule's gates and of the rule, each rule judged once a batch.

        Args:
            rules: The rule's gates and then the rule.
            arguments: Arguments of the call by name, which identify the batch.
            make: Makes the rows of a new batch.
            score: Judges rows by rules.
        """
        given = {name: value for name, value in arguments.items() if name not in TRL_EXTRAS}
        same = given.keys() == self.arguments.keys() and all(self.arguments[name] is given[name] for name in given)
        if rules[-1].name in self.served or not same:
            self.arguments, self.rows, self.found, self.served = given, make(), {}, set()
        self.served.add(rules[-1].name)
        missing = [rule for rule in rules if rule.name not in self.found]
        self.found.update(zip((rule.name for rule in missing), score(missing, self.rows), strict=True))
        return [self.found[rule.name] for rule in rules]


@dataclass(slots=True)
class RuleSet:
    """A set of rules with one total: pass it to TRL as `reward_funcs`, or `rules.split()` for one column per rule.

    Args:
        rules: Rules with different names.
        clip: Lowest and highest total, or None.
        name: The reward's name in TRL: its metric is `rewards/<name>/mean`.
        limits: Limits of time and memory for the rules that run in workers.
        isolate: False runs all rules in this process, for a debugger; then a rule that hangs stops the run.
        on_error: Effect of an exception in a rule. "stop": ends the run, on all ranks, with a RuleError. "floor":
            reports it once, and the row earns the rule's floor.
        on_unscored: Effect in our trainers if a rule has no value in the whole first step, so that the run would only
            learn the other rules. "error": end the run, on all ranks, with a DataError. "warn": warn once.
        normalise: Subtract the running mean of totals and divide by their running standard deviation. For PPO; GRPO
            does it per group. Our trainers pool the totals of all ranks after each training batch, and save the
            statistics in checkpoints.

    Examples:
        >>> rules = RuleSet([Answer(), Length(high=24, weight=0.1, gate="answer")])
        >>> rules(completions=["A: 18", "A: 17"], completion_ids=[[1, 2], [1, 2]], answer=["18", "18"])
        [1.1, 0.0]
    """

    rules: Sequence[Rule]
    clip: tuple[float, float] | None = None
    name: str = "rules"
    limits: Limits = field(default_factory=Limits)
    isolate: bool = True
    on_error: str = "stop"
    on_unscored: str = "error"
    normalise: bool = False
    # `Row.prompt_end` of all rows. Trainers and commands set it, because they know the chat template.
    prompt_end: str = field(init=False, repr=False, compare=False, default="")
    _composition: Composition = field(init=False, repr=False, compare=False)
    _scorer: Scorer = field(init=False, repr=False, compare=False)
    _moments: Moments = field(init=False, repr=False, compare=False, default_factory=Moments)
    _unshared: Moments = field(init=False, repr=False, compare=False, default_factory=Moments)
    _batch: SharedBatch | None = field(init=False, repr=False, compare=False, default=None)
    _tallies: dict[str, Tally] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = checked_rules(self.rules)
        self.clip = pair_of("The set", "clip", self.clip)
        self._composition = Composition(self.rules, self.clip)
        for key in ("isolate", "on_error", "on_unscored", "normalise"):
            check_set_key(key, getattr(self, key))
        if not isinstance(self.limits, Limits):
            raise RuleError(f"limits is {self.limits!r}. Give Limits(...), such as Limits(cpu_s=2).")
        self._scorer = Scorer(self.limits, self.isolate, self.on_error)
        self.__name__ = self.name
        warning = outbid_warning(self.rules)
        if warning:
            warn_once(warning, warning)

    @property
    def __name__(self) -> str:
        """The name, as TRL reads it from a reward function. It can be set."""
        return self.name

    @__name__.setter
    def __name__(self, name: str) -> None:
        check_name("A rule set", name)
        if any(rule.name == name for rule in self.rules):
            raise RuleError(f"The set and one of its rules are both named '{name}' and share a metric. Rename it.")
        self.name = name

    @property
    def columns(self) -> tuple[str, ...]:
        """Dataset columns that the rules read, each once."""
        return tuple(dict.fromkeys(column for rule in self.rules for column in rule.all_columns))

    @property
    def reads_group(self) -> bool:
        """True if a rule reads `row.group`."""
        return any(rule.reads_group for rule in self.rules)

    # Scoring --------------------------------------------------------------------------------------------------------

    def __call__(
        self, /, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """Return the total of each completion, as TRL calls it: columns are lists, with TRL's arguments among them."""
        found, composed = self._compose(prompts, completions, completion_ids, columns)
        self._log(found, composed, columns)
        self._count(range(len(self.rules)), found, columns)
        totals = [row.total for row in composed]
        if not self.normalise:
            return totals
        seen = self._moments.merged(self._unshared)
        self._unshared = self._unshared.merged(Moments.of(total for total in totals if total is not None))
        return [None if total is None else seen.normalised(total) for total in totals]

    def start(
        self, /, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **columns: Any
    ) -> None:
        """Start the workers; the next call with the same arguments collects their verdicts."""
        self._scorer.start(self.rules, self._rows(prompts, completions, completion_ids, columns))

    @property
    def rows_at_once(self) -> float:
        """Number of rows that rules in workers or servers may judge at once; 0 without such rules."""
        elsewhere = [rule for rule in self.rules if self._scorer.runs_elsewhere(rule)]
        return min((getattr(rule, "concurrency", math.inf) for rule in elsewhere), default=0)

    def begin(self, /, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Early:
        """Start rules in workers or servers on rows of a later batch. Thread-safe."""
        return self._scorer.begin(self.rules, self._rows(prompts, completions, completion_ids, columns))

    def remember(self, early: Early) -> None:
        """Keep the verdicts on the rows of `begin`."""
        self._scorer.remember(early)

    def score(self, /, prompt: Any, completion: Any, completion_ids: Any = None, **columns: Any) -> float | None:
        """Return the total of one completion; columns are single values."""
        return self.explain(prompt, completion, completion_ids, **columns).total

    def explain(self, /, prompt: Any, completion: Any, completion_ids: Any = None, **columns: Any) -> Explanation:
        """Explain one completion's total, as an object that prints as a table. Columns are single values."""
        lists = {name: [value] for name, value in columns.items()}
        ids = None if completion_ids is None else [completion_ids]
        return self.explain_all([prompt], [completion], ids, **lists)[0]

    def explain_all(
        self, /, prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any
    ) -> list[Explanation]:
        """Explain the totals of a batch, judged as in a training, without metrics or state. Columns are lists."""
        return self._explain(*self._compose(prompts, completions, completion_ids, columns))

    def explain_row(self, row: Row) -> Explanation:
        """Explain the total of one row of `make_rows`, which holds its group and step."""
        require_columns(self.rules, row.columns)
        found = self._scorer.columns(self.rules, [row])
        return self._explain(found, [self._composition.of([column.verdicts[0] for column in found])])[0]

    def _explain(self, found: Sequence[Column], composed: Sequence[Composed]) -> list[Explanation]:
        verdicts = zip(*(column.verdicts for column in found), strict=True)
        return [self._composition.explained(own, row) for own, row in zip(verdicts, composed, strict=True)]

    def split(self) -> list["RuleColumn"]:
        """Return one callable per rule, a TRL column each; with TRL's default reward weights they sum to the total.

        TRL passes each batch to all of them, but a rule judges it once, even if it is the gate of several rules.
        """
        if self.clip is not None:
            raise RuleError(f"clip={self.clip} bounds the sum, and split() has no sum. Build the set without clip.")
        if self.normalise:
            raise RuleError("normalise=True is of the sum, and split() has no sum. Build the set without it.")
        batch, columns = SharedBatch(), []
        for rule, chain in zip(self.rules, self._composition.chains, strict=True):
            gates = [self.rules[gate] for gate, _ in reversed(chain)]
            # A name that no rule has; the column has its rule's name.
            name = f"{self.name}.{rule.name}"
            alone = RuleSet([*gates, rule], name=name, on_error=self.on_error, on_unscored=self.on_unscored)
            # A rule judges once for all columns.
            alone._scorer, alone._batch, alone.prompt_end = self._scorer, batch, self.prompt_end
            columns.append(RuleColumn(alone))
        return columns

    def verdicts_on_data(self, name: str, prompts: Any, columns: Mapping[str, Sequence[Any]]) -> list[Verdict]:
        """Return verdicts of the rule `name` that show for which rows it has a value, for any completion."""
        rule = next(rule for rule in self.rules if rule.name == name)
        num_rows = len(next(iter(columns.values()))) if columns else len(prompts)
        # If the data is at fault, a rule has no value for any answer but the gold's text. So each row is judged with
        # the ideal answer of another row, or "" if the rule has no ideal answers.
        ideals = [ideal_of(rule, _cells_of(columns, row), row) for row in range(num_rows)]
        first, *others = dict.fromkeys(ideal for ideal in ideals if ideal is not None) or [""]
        texts = [first if ideal != first else next(iter(others), "") for ideal in ideals]
        rows = make_rows(prompts, texts, [()] * num_rows, columns, grouped=rule.reads_group)
        return self._scorer.columns([rule], rows)[0].verdicts

    def take_tallies(self) -> dict[str, Tally]:
        """Return the counts of rows since the last call, by rule, and count from 0 again."""
        tallies, self._tallies = self._tallies, {}
        return tallies

    def reset(self) -> None:
        """Forget failures of the machine and of servers, so that a set stopped by `max_infra_frac` continues."""
        self._scorer.reset()

    def close(self) -> None:
        """End the workers. They start again when they are needed, and end with the process."""
        self._scorer.pool.close()

    # Files ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "RuleSet":
        """Make a set from `{"rules": [{"rule": "answer", "gold": "answer"}, ...], "clip": [-1, 1]}`."""
        from trl_ext.rewards.config import build_rules

        return cls(**build_rules(mapping))

    @classmethod
    def from_yaml(cls, path: str | Path) -> "RuleSet":
        """Make a set from a YAML file with the keys of `from_dict`; a ConfigError names the file and the line."""
        from trl_ext.rewards.config import load_rules

        return load_rules(path, cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `from_dict` reads, without fields at their default."""
        from trl_ext.rewards.config import describe_rules

        return describe_rules(self)

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state that a resumed run needs from a checkpoint to give the same scores."""
        seen = self._moments.merged(self._unshared)
        return {"moments": [seen.count, seen.mean, seen.squares]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore a result of `state_dict()`."""
        self._moments, self._unshared = Moments(*state["moments"]), Moments()

    def synchronise(self, gather: Callable[[list[float]], list[list[float]]] | None) -> None:
        """Merge the totals of all ranks since the last call into each rank's running statistics.

        Without a call, a set uses the totals of its process.

        Args:
            gather: A function from a list of three numbers to the lists of all ranks, in order. None forgets the
                totals since the last call: an evaluation must not change a training's statistics.
        """
        mine, self._unshared = self._unshared, Moments()
        parts = [] if gather is None else gather([mine.count, mine.mean, mine.squares])
        self._moments = self._moments.merged(reduce(Moments.merged, (Moments(*part) for part in parts), Moments()))

    # Inside ---------------------------------------------------------------------------------------------------------

    def _compose(
        self, prompts: Any, completions: Any, ids: Any, extras: Mapping[str, Any]
    ) -> tuple[list[Column], list[Composed]]:
        """Return a batch's verdicts by rule, and its rewards by row.

        Args:
            prompts, completions, ids: As TRL passes them to a reward function.
            extras: Further keywords of the call: dataset columns, and the keywords of TRL.
        """

        def make() -> list[Row]:
            return self._rows(prompts, completions, ids, extras)

        if self._batch is None:
            found = self._scorer.columns(self.rules, make())
        else:
            require_columns(self.rules, dataset_columns(extras))
            arguments = {"prompts": prompts, "completions": completions, "completion_ids": ids, **extras}
            found = self._batch.columns(self.rules, arguments, make, self._scorer.columns)
        by_row = zip(*(column.verdicts for column in found), strict=True)
        return found, [self._composition.of(verdicts) for verdicts in by_row]

    def _rows(self, prompts: Any, completions: Any, ids: Any, extras: Mapping[str, Any]) -> list[Row]:
        """Return the rows of a batch; a DataError names a column that a rule reads and the batch lacks.

        Args:
            prompts, completions, ids: As TRL passes them to a reward function.
            extras: Further keywords of the call: dataset columns, and the keywords of TRL.
        """
        columns = dataset_columns(extras)
        require_columns(self.rules, columns)
        step = getattr(extras.get("trainer_state"), "global_step", None)
        return make_rows(prompts, completions, ids, columns, step, self.prompt_end, grouped=self.reads_group)

    def _count(self, positions: Iterable[int], found: Sequence[Column], extras: Mapping[str, Any]) -> None:
        columns = dataset_columns(extras)
        for position in positions:
            name = self.rules[position].name
            self._tallies[name] = self._tallies.get(name, Tally()) + tally(position, self.rules, found, columns)

    def _log(self, found: list[Column], composed: list[Composed], extras: Mapping[str, Any]) -> None:
        log_metric, log_extra = extras.get("log_metric"), extras.get("log_extra")
        if not composed:
            return
        if callable(log_metric):
            for position, (rule, column) in enumerate(zip(self.rules, found, strict=True)):
                log_rule(log_metric, rule, column, [row.states[position] for row in composed])
            log_metric("rules/workers_restarted", float(self._scorer.pool.restarts))
        if callable(log_extra):
            log_extra("rule_trace", traces(self.rules, found, composed))
            if cells := read_cells(self.rules, dataset_columns(extras)):
                log_extra("rule_columns", cells)


@dataclass(frozen=True, slots=True)
class RuleColumn:
    """One rule of a set as a separate reward function, gated and, by default, weighted as in the set.

    TRL logs the mean of the weighted, gated value under `rewards/<rule>/mean`.

    Args:
        rules: A set of the rule's gates and, last, the rule.
        weighted: Whether the value is multiplied by the rule's weight.
    """

    rules: RuleSet
    weighted: bool = True

    @property
    def __name__(self) -> str:
        return self.rules.rules[-1].name

    @property
    def columns(self) -> tuple[str, ...]:
        """Dataset columns that the rule and its gates read."""
        return self.rules.columns

    @property
    def on_unscored(self) -> str:
        """The setting of the rule's set."""
        return self.rules.on_unscored

    def __call__(
        self, /, prompts: Any = None, completions: Any = None, completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """Return the rule's contribution for each completion."""
        found, composed = self.rules._compose(prompts, completions, completion_ids, columns)
        self.rules._count([len(found) - 1], found, columns)
        log_metric = columns.get("log_metric")
        if callable(log_metric) and composed:
            # TRL logs keys of `rewards/`: the mean of this column's values.
            def log_ours(key: str, value: float) -> None:
                if not key.startswith("rewards/"):
                    log_metric(key, value)

            log_rule(log_ours, self.rules.rules[-1], found[-1], [row.states[-1] for row in composed])
        if self.weighted:
            return [row.contributions[-1] for row in composed]
        return [contribution(1.0, row.values[-1], row.states[-1]) for row in composed]


def _cells_of(columns: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    """Return the values of one row by column."""
    return {name: cells[row] for name, cells in columns.items()}


def require_columns(rules: Iterable[Rule], columns: Mapping[str, Any]) -> None:
    """Raise DataError if a rule reads a column that the dataset lacks."""
    for rule in rules:
        for column in rule.all_columns:
            if column not in columns:
                there = ", ".join(sorted(columns)) or "none"
                raise DataError(
                    f"Rule '{rule.name}' reads the column '{column}', which the dataset lacks; its columns are: "
                    f"{there}. Rename a column, or set which one the rule reads."
                )


def checked_rules(rules: Any) -> tuple[Rule, ...]:
    """Return the rules as a tuple; RuleError unless they are rules with different names."""
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
        raise RuleError(f"Several rules are named {', '.join(twice)}. Give each a different name: name='...'.")
    return rules

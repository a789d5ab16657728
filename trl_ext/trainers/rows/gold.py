"""Checks of the columns that rules score against: a rule with an empty column would silently drop out of the sum.

The rules themselves are run to find golds that they cannot read, before any completion is generated. A rule that
scores no completion is an error at the first step, a single warning later. A step has the completions of all ranks for
one optimizer step, in one batch of generations or several.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerState
from transformers.utils import logging

from trl_ext.errors import DataError, TrlExtError
from trl_ext.rewards import RuleColumn, RuleSet
from trl_ext.rewards.base.rows import as_columns, is_null
from trl_ext.rewards.base.rule import Rule, Verdict, applies
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.rewards.totals.metrics import Tally
from trl_ext.rewards.totals.scorer import gives_batches
from trl_ext.trainers.rows.screen import batches, check_utf8
from trl_ext.trainers.rows.sentence import named

# A rule is tried on at most this many of its rows, evenly spaced. Rules in workers take seconds for them.
MAX_ROWS_TRIED = 256
_ROWS_LOOKED_AT = 16 * MAX_ROWS_TRIED
# Statuses of rows whose gold cannot be read.
_UNREAD = ("gold_invalid", "undecided")
Key = tuple[int, str]  # a reward function's index, and the name of one of its rules

logger = logging.get_logger(__name__)


def check_gold(dataset: Dataset, reward_funcs: Sequence[Any], role: str) -> None:
    """Raise DataError for a rule that fits no row, or whose column is null, NaN or unreadable in all of its rows.

    Warn of a column that is so in some rows, and of a rule that fits no held-out row.
    """
    for rules in reward_funcs:
        for rule in _rules_of(rules):
            check_utf8(dataset, role, sorted(set(rule.all_columns) & set(dataset.column_names)))
            if not set(rule.all_columns) <= set(dataset.column_names):
                continue  # a rollout_func adds the others
            _check_when(dataset, rule, role, is_fatal=_is_fatal(rules) and role == "train_dataset")
            for column in rule.columns:
                _check_column(dataset, rule, column, role, is_fatal=_is_fatal(rules))
            rows = rows_tried(rule, dataset) if rule.columns else {}
            said = unread_golds(rules, rule, list(rows.values()))
            unread = [row for row, why in zip(rows, said, strict=False) if why]
            if unread and len(unread) == len(rows) and _is_fatal(rules):
                raise DataError(
                    f"{role}: rule '{rule.name}' can read the gold of none of the {len(said)} rows that it was tried "
                    f"on; the first: {said[0]}. Only the other rewards would be learned. Mend the column (a recipe "
                    "reads a value within it by columns: {answer: column.key}, numbers of options by first_option) or "
                    "the rule, or give the rule `when`; where this is meant, set on_unscored='warn' for the RuleSet."
                )
            if unread:
                logger.warning(
                    f"{role}: rule '{rule.name}' cannot read the gold of {len(unread)} of the {len(rows)} rows that "
                    f"it was tried on ({named(unread)}): {next(filter(None, said))}. There it scores nothing. Mend or "
                    "drop such rows; trl-ext score audit names all of them."
                )


def _check_when(dataset: Dataset, rule: Rule, role: str, is_fatal: bool) -> None:
    """Raise DataError, or warn, if no row has a value that the rule's `when` names.

    Args:
        dataset: The rows.
        rule: Judges rows with these values only.
        role: The dataset in messages: "train_dataset".
        is_fatal: Whether it stops the run.
    """
    for column, wanted in (rule.when or {}).items():
        values = dataset.with_format(None)[column][:]
        if not any(value in wanted for value in values):
            there = ", ".join(list(dict.fromkeys(map(repr, values)))[:4])
            problem = f"{role}: rule '{rule.name}' is for rows whose '{column}' is {' or '.join(map(repr, wanted))}"
            if is_fatal:
                raise DataError(
                    f"{problem}, and no row is; the column holds {there}. The rule would score nothing. Mend `when`, "
                    "or leave the rule out; where this is meant, set on_unscored='warn' for the RuleSet."
                )
            logger.warning(f"{problem}, and no row is; the column holds {there}. Here the rule scores nothing.")


def _check_column(dataset: Dataset, rule: Rule, column: str, role: str, is_fatal: bool) -> None:
    """Name the cells of a column that a rule reads and that are null or NaN, in a warning or an error.

    Args:
        dataset: The rows.
        rule: Reads the column.
        column: Its name.
        role: The dataset in messages: "train_dataset".
        is_fatal: Whether a column without any value stops the run; else it is named in a warning.
    """
    empty = np.flatnonzero(np.concatenate([is_empty(values) for _, values in batches(dataset, column)]))
    if not len(empty):
        return
    num_rows = len(dataset)
    if rule.when:
        wanted = dataset.select_columns(list(rule.when)).with_format(None)
        is_for = np.array([applies(rule.when, row) for row in wanted])
        num_rows, empty = int(is_for.sum()), empty[is_for[empty]]
    if not len(empty):
        return
    what = f"{role}: rule '{rule.name}' reads the column '{column}', which is null or NaN in"
    if len(empty) == num_rows and is_fatal:
        raise DataError(
            f"{what} all {num_rows} of its rows, so that the rule would score nothing. Fill the column, name another "
            "one in the rule, or leave the rule out."
        )
    logger.warning(
        f"{what} {len(empty)} of its {num_rows} rows ({named(empty.tolist())}): there it scores nothing. Drop such "
        "rows, or fill them."
    )


def rows_tried(rule: Rule, dataset: Dataset) -> dict[int, dict[str, Any]]:
    """Return rows, by number, to which the rule applies and which have its columns: at most MAX_ROWS_TRIED, or all
    if the rule can judge the data alone."""
    names = sorted({"prompt"} & set(dataset.column_names) | set(rule.all_columns))
    numbers = range(0, len(dataset), 1 if _reads_data(rule) else -(-len(dataset) // _ROWS_LOOKED_AT))
    plain = dataset.with_format(None).select_columns(names).select(numbers) if names else ()
    found = [(number, row) for number, row in zip(numbers, plain, strict=False) if _is_for(rule, row)]
    return dict(found if _reads_data(rule) else found[:: -(-len(found) // MAX_ROWS_TRIED) or 1])


def _is_for(rule: Rule, row: Mapping[str, Any]) -> bool:
    """Return True if the rule applies to the row, and the row has its columns."""
    return applies(rule.when, row) and not any(is_null(row.get(name)) for name in rule.columns)


def verdicts_on(function: Any, rule: Rule, rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return verdicts that show which rows the rule can score; empty if it raises, as the first step would, too."""
    rules = next((one for one in (function, function.rules) if isinstance(one, RuleSet)), None)
    if not rows or rules is None:
        return []
    if _reads_data(rule):
        whys = map(rule.unread, rows)  # type: ignore[attr-defined]
        return [Verdict(None, "gold_invalid", why) if why else Verdict(rule.floor) for why in whys]
    columns = as_columns(rows, rule.all_columns)
    try:
        return rules.verdicts_on_data(rule.name, [row.get("prompt") for row in rows], columns)
    except TrlExtError:
        return []


def unread_golds(function: Any, rule: Rule, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each row why the rule cannot read its gold, or ""; [] if the rule has none or is costly."""
    costs = rule.is_async and not _reads_data(rule)
    if not rule.columns or costs or (gives_batches(rule) and not rule.judges_correctness):
        return []
    said = ((verdict.status, verdict.detail) for verdict in verdicts_on(function, rule, rows))
    return [f"{status}: {detail}" if status in _UNREAD else "" for status, detail in said]


def _reads_data(rule: Rule) -> bool:
    """Return True for a rule that calls a server, but can check a row's data without it."""
    return isinstance(rule, AsyncRule) and type(rule).unread is not AsyncRule.unread


def _is_fatal(function: Any) -> bool:
    return getattr(function, "on_unscored", "error") != "warn"


def _rules_of(function: Any) -> Iterator[Rule]:
    """Yield the rules of a RuleSet, or of the set to which a RuleColumn belongs."""
    rules = getattr(function, "rules", ())
    for rule in getattr(rules, "rules", rules):
        if isinstance(rule, Rule):
            yield rule


def is_empty(column: pa.Array) -> np.ndarray:
    is_nan = pa.types.is_floating(column.type)
    empty: np.ndarray = pc.is_null(column, nan_is_null=is_nan).to_numpy(zero_copy_only=False)
    return empty


def batches_per_step(args: Any) -> int:
    """Return the number of generation batches of the first optimizer step."""
    return int(-(-args.gradient_accumulation_steps // (args.steps_per_generation * args.num_iterations)))


class ScoredTrainer(Protocol):
    """A GRPO trainer whose completions are scored; the names are TRL's.

    Args:
        args: Its config.
        accelerator: Its accelerator.
        state: Of transformers: the steps taken.
        model: The policy; `model.training` is False in an evaluation.
        reward_funcs: The reward functions.
        train_dataset: Its rows.
    """

    args: Any
    accelerator: Accelerator
    state: TrainerState
    model: Any
    reward_funcs: Any
    train_dataset: Any


@dataclass(eq=False)
class UnscoredRules:
    """Finds rules that score no row; `tallies` counts the rows of this step on all ranks, by function and rule."""

    tallies: dict[Key, Tally] = field(default_factory=dict)
    num_batches: int = 0
    warned: set[Key] = field(default_factory=set)

    def begin(self, functions: list[Any]) -> None:
        """Drop tallies of calls that the trainer did not make."""
        for _, rules in _sets_of(functions):
            rules.take_tallies()

    def look(self, trainer: ScoredTrainer) -> None:
        """Add the rules' tallies since `begin`; at the end of a step, check them. Collective.

        Raises:
            DataError: on all ranks, for a rule with on_unscored="error" that scored nothing in the whole first step,
                unless it can score other rows of the data.
        """
        # The rules whose values reach the loss: all rules of a RuleSet, the last rule of a RuleColumn.
        rules = {
            (place, rule.name): rule
            for place, one in _sets_of(trainer.reward_funcs)
            for rule in (one.rules[-1:] if isinstance(trainer.reward_funcs[place], RuleColumn) else one.rules)
        }
        if not rules or not trainer.model.training:
            return
        taken = {place: rule_set.take_tallies() for place, rule_set in _sets_of(trainer.reward_funcs)}
        own = {key: taken[key[0]].get(key[1], Tally()) for key in rules}
        for part in gather_object([own]):
            for key, tally in part.items():
                self.tallies[key] = self.tallies.get(key, Tally()) + tally
        self.num_batches += 1
        if self.num_batches % batches_per_step(trainer.args):
            return
        tallies, self.tallies = self.tallies, {}
        # A resumed run has had its first step.
        is_first = self.num_batches == batches_per_step(trainer.args) and trainer.state.global_step == 0
        for key, tally in tallies.items():
            if tally.num_unscored:
                self._judge(trainer, key, rules[key], tally, is_first=is_first)

    def _judge(self, trainer: ScoredTrainer, key: Key, rule: Rule, tally: Tally, *, is_first: bool) -> None:
        """Warn once of a rule that scored only a part of a step's rows; DataError if it can score none.

        Args:
            trainer: Whose step it is.
            key: The rule set's place among the reward functions, and the rule's name.
            rule: The rule.
            tally: Its scores in the step, over all ranks.
            is_first: Whether it is the first step of a run.
        """
        function, dataset = trainer.reward_funcs[key[0]], trainer.train_dataset
        why = tally.why(rule)
        if is_first and tally.scored_nothing and function.on_unscored == "error":
            if not _can_score(function, rule, dataset, tally):
                raise DataError(
                    f"Rule '{rule.name}' scored none of the {tally.num_rows} completions of the first step: {why}. "
                    "Only the other rewards would be learned. Mend the column or the rule, or give the rule `when`; "
                    "where this is meant, set on_unscored='warn' for the RuleSet."
                )
        # All rows of a dataset are checked before the first step, with a message about null values.
        is_known = isinstance(dataset, Dataset) and tally.num_null == tally.num_unscored
        if key in self.warned or (is_known and not tally.scored_nothing):
            return
        self.warned.add(key)
        if trainer.accelerator.is_main_process:
            logger.warning(
                f"Rule '{rule.name}' scored {tally.num_scored} of the {tally.num_rows} completions of step "
                f"{trainer.state.global_step + 1}: {why}. For those only the other rewards count; "
                f"rules/{rule.name}/none_frac is their share."
            )


def _can_score(function: Any, rule: Rule, dataset: Any, tally: Tally) -> bool:
    """Return True if the rule can score other rows than the rows of this step. Collective.

    In a mixture of tasks, a small step may have no row for some rule. For a dataset the rule is tried on other rows.
    For a stream, or without the rule's columns, other rules of correctness must have scored all rows of the step.

    Args:
        function: The reward function that holds the rule.
        rule: The rule.
        dataset: The rows that a run trains on.
        tally: The scores of the rule in this step, over all ranks.
    """
    if not isinstance(dataset, Dataset) or not set(rule.all_columns) <= set(dataset.column_names):
        return tally.num_covered == tally.num_rows
    verdicts = verdicts_on(function, rule, list(rows_tried(rule, dataset).values()))
    can = any(verdict.value is not None for verdict in verdicts)
    return any(gather_object([can]))


def _sets_of(functions: list[Any]) -> Iterator[tuple[int, RuleSet]]:
    """Yield the index and the rule set of each RuleSet and RuleColumn."""
    for place, function in enumerate(functions):
        if isinstance(function, RuleSet | RuleColumn):
            yield place, function if isinstance(function, RuleSet) else function.rules

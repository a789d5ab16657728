"""Rules that score no completion: an error at the first step, a single warning later.

A step has the completions of all ranks for one optimizer step, in one batch of generations or several.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.rewards import Rule, RuleColumn, RuleSet
from trl_ext.rewards.totals.metrics import Tally
from trl_ext.trainers.rows.gold import rows_tried, verdicts_on

logger = logging.get_logger(__name__)
Key = tuple[int, str]  # a reward function's index, and the name of one of its rules


def batches_per_step(args: Any) -> int:
    """Return the number of generation batches of the first optimizer step."""
    return int(-(-args.gradient_accumulation_steps // (args.steps_per_generation * args.num_iterations)))


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

    def look(self, trainer: Any) -> None:
        """Add the rules' tallies since `begin`; at the end of a step, check them. Collective.

        Raises:
            DataError: on all ranks, for a rule with on_unscored="error" that scored nothing in the whole first step,
                unless it can score other rows of the data.
        """
        rules = dict(_rules_of(trainer.reward_funcs))
        if not rules or not trainer.model.training:
            return
        taken = {place: rule_set.take_tallies() for place, rule_set in _sets_of(trainer.reward_funcs)}
        own = {key: taken[key[0]].get(key[1], Tally()) for key in rules}
        for part in gather_object([own]) if trainer.accelerator.num_processes > 1 else [own]:
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

    def _judge(self, trainer: Any, key: Key, rule: Rule, tally: Tally, *, is_first: bool) -> None:
        function, dataset = trainer.reward_funcs[key[0]], trainer.train_dataset
        why = tally.why(rule)
        if is_first and tally.scored_nothing and function.on_unscored == "error":
            if not _can_score(function, rule, dataset, tally, trainer.accelerator):
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


def _can_score(function: Any, rule: Rule, dataset: Any, tally: Tally, accelerator: Any) -> bool:
    """Return True if the rule can score other rows than the rows of this step. Collective.

    In a mixture of tasks, a small step may have no row for some rule. For a dataset the rule is tried on other rows.
    For a stream, or without the rule's columns, other rules of correctness must have scored all rows of the step.
    """
    if not isinstance(dataset, Dataset) or not set(rule.all_columns) <= set(dataset.column_names):
        return tally.num_covered == tally.num_rows
    verdicts = verdicts_on(function, rule, list(rows_tried(rule, dataset).values()))
    can = any(verdict.value is not None for verdict in verdicts)
    return any(gather_object([can])) if accelerator.num_processes > 1 else can


def _sets_of(functions: list[Any]) -> Iterator[tuple[int, RuleSet]]:
    """Yield the index and the rule set of each RuleSet and RuleColumn."""
    for place, function in enumerate(functions):
        if isinstance(function, RuleSet | RuleColumn):
            yield place, function if isinstance(function, RuleSet) else function.rules


def _rules_of(functions: list[Any]) -> Iterator[tuple[Key, Rule]]:
    """Yield the rules whose values reach the loss: all rules of a RuleSet, the last rule of a RuleColumn."""
    for place, rules in _sets_of(functions):
        is_column = isinstance(functions[place], RuleColumn)
        for rule in rules.rules[-1:] if is_column else rules.rules:
            yield (place, rule.name), rule

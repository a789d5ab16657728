"""The columns that rules score against: a rule whose column is empty would leave the sum without a word."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.rewards.rule import Rule
from trl_ext.rewards.totals.shaping import applies
from trl_ext.trainers.rows.screen import batches
from trl_ext.trainers.rows.sentence import named

logger = logging.get_logger(__name__)


def check_gold(dataset: Dataset, reward_funcs: Sequence[Any], role: str) -> None:
    """Raise DataError for a rule whose column is null or NaN in all of its rows; warn where it is in some.

    Args:
        dataset: Rows with the columns that the rules read.
        reward_funcs: Rule sets among them say what they read.
        role: What the message calls the dataset.
    """
    for rules in reward_funcs:
        for rule in _rules_of(rules):
            for column in rule.columns:
                _check_column(dataset, rule, column, role, is_fatal=getattr(rules, "on_unscored", "stop") != "warn")


def _check_column(dataset: Dataset, rule: Rule, column: str, role: str, is_fatal: bool) -> None:
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


def _rules_of(function: Any) -> Iterator[Rule]:
    """Yield the rules of a RuleSet; of one column of a set, those of its set."""
    rules = getattr(function, "rules", ())
    for rule in getattr(rules, "rules", rules):
        if isinstance(rule, Rule):
            yield rule


def is_empty(column: pa.Array) -> np.ndarray:
    is_nan = pa.types.is_floating(column.type)
    empty: np.ndarray = pc.is_null(column, nan_is_null=is_nan).to_numpy(zero_copy_only=False)
    return empty

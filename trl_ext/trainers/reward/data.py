"""Preparation of preference data around TRL's tokenization.

Pairs that TRL has dropped as too long are counted; the columns `shared_tokens` and `rule_gap` are added.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.rewards.pairs import rule_gaps
from trl_ext.trainers.forward.pairs import SHARED, num_shared_tokens
from trl_ext.trainers.rows.sentence import columns_of

logger = logging.get_logger(__name__)

_SIDES = ["chosen_ids", "rejected_ids"]
# Columns added to the dataset. `row` is the pair's number in the user's dataset.
ROW, GAP = "row", "rule_gap"


def report_dropped(dataset: Any, num_before: int | None, max_length: int | None, role: str) -> None:
    """Warn how many of `num_before` pairs (None: a stream's) TRL has dropped; raise DataError if none is left.

    `role` is the dataset's name in messages.
    """
    if num_before is None or not (num_dropped := num_before - len(dataset)):
        return
    too_long = f"{num_dropped} of {num_before} pairs have a side longer than max_length={max_length} tokens"
    if num_dropped == num_before:
        raise DataError(f"{role}: {too_long}, so none is left. Raise max_length.")
    logger.warning(f"{role}: {too_long}, and are dropped. Raise max_length to keep them.")


def add_shared_tokens(dataset: Any) -> Any:
    """Add the column `shared_tokens` if it is missing."""
    if SHARED in (dataset.column_names or ()):
        return dataset
    # A stream's map takes no description.
    options = {"desc": "Comparing the sides"} if isinstance(dataset, Dataset) else {}
    return dataset.map(lambda c, r: {SHARED: num_shared_tokens(c, r)}, input_columns=_SIDES, **options)


def add_rule_gaps(dataset: Any, rules: Any, role: str) -> Any:
    """Add the column `rule_gap`: the rules' score of chosen minus their score of rejected.

    An existing column is replaced, as sides may have been swapped since. Tokenized datasets and streams get none.
    """
    columns = columns_of(dataset, role)
    if "chosen_ids" in columns:
        return dataset
    if isinstance(dataset, IterableDataset):
        logger.warning(f"{role} is a stream, to which the rules are not applied. Give them a dataset, not a stream.")
        return dataset
    gaps = rule_gaps(dataset, rules)
    return (dataset.remove_columns(GAP) if GAP in columns else dataset).add_column(GAP, gaps)


def add_row_numbers(dataset: Any) -> Any:
    """Add the column `row`, by which messages name a pair; a stream stays as it is."""
    if not isinstance(dataset, Dataset) or ROW in dataset.column_names:
        return dataset
    return dataset.add_column(ROW, list(range(len(dataset))))


def check_budget(dataset: Dataset, pair_tokens: Sequence[int], max_tokens: int, role: str) -> None:
    """Raise DataError if a pair is larger than one forward."""
    too_long = [i for i, tokens in enumerate(pair_tokens) if tokens > max_tokens]
    if not too_long:
        return
    first, longest = too_long[0], max(pair_tokens)
    name = dataset[first].get(ROW, first)
    raise DataError(
        f"max_tokens_per_forward={max_tokens} is smaller than {len(too_long)} of {len(pair_tokens)} pairs of {role}; "
        f"the first is row {name} with {pair_tokens[first]} tokens, the longest has {longest}. Set it to at least "
        f"{longest}, or lower max_length."
    )


def lengths(dataset: Dataset, column: str) -> list[int]:
    """Return the number of tokens in every row of a column, without loading the token ids as lists."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return [n for table in tables for n in pc.list_value_length(table[column]).to_pylist()]

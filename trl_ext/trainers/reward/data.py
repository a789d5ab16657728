"""Preparation of preference data around TRL's tokenization.

Pairs that are too long are dropped or shortened, and counted; the columns `shared_tokens` and `rule_gap` are added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from trl_ext.errors import DataError
from trl_ext.rewards.preference.gaps import rule_gaps
from trl_ext.trainers.forward.pairs import SHARED, num_shared_tokens
from trl_ext.trainers.rows.screen import maybe_equal, rows_where
from trl_ext.trainers.rows.sentence import columns_of

logger = logging.get_logger(__name__)

_SIDES = ["chosen_ids", "rejected_ids"]
# Columns added to the dataset. `row` is the pair's number in the user's dataset.
ROW, GAP = "row", "rule_gap"


def fit_to_length(dataset: Any, max_length: int | None, policy: str, keep_first: int | None, role: str) -> Any:
    """Drop or shorten pairs with a side of more than `max_length` tokens, and warn how many they are.

    Args:
        max_length: Most tokens of a side; None for any number.
        policy: "drop", or "truncate_prompt": cut off the oldest tokens that both sides share.
        keep_first: Token id that is not cut off if it comes first, such as BOS.
        role: The dataset's name in messages.

    Raises:
        DataError: no pair is left.
    """
    if max_length is None:
        return dataset
    is_stream = isinstance(dataset, IterableDataset)
    num_long = None if is_stream else _num_longer(dataset, max_length)
    if num_long == 0:
        return dataset
    if policy == "truncate_prompt":
        if SHARED in columns_of(dataset, role):
            dataset = dataset.remove_columns(SHARED)  # counted before the prompts were cut
        dataset = _apply(dataset.map, Shortening(max_length, keep_first), dataset, f"Shortening prompts of {role}")
    num_dropped = None if is_stream else _num_longer(dataset, max_length)
    if num_dropped != 0:
        dataset = _apply(
            dataset.filter, lambda c, r: max(len(c), len(r)) <= max_length, dataset, f"Filtering {role}", _SIDES
        )
    if num_long is not None and num_dropped is not None:
        _report(role, len(dataset) + num_dropped, num_dropped, num_long, max_length, policy)
    return dataset


@dataclass(frozen=True)
class Shortening:
    """Cuts the oldest shared tokens of a pair until both sides fit; leaves the pair unchanged if they cannot."""

    max_length: int
    keep_first: int | None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        chosen, rejected = row["chosen_ids"], row["rejected_ids"]
        surplus = max(len(chosen), len(rejected)) - self.max_length
        start = int(bool(chosen) and chosen[0] == self.keep_first)
        # One shared token stays in front of the answer.
        if surplus <= 0 or surplus > num_shared_tokens(chosen, rejected) - start - 1:
            return {"chosen_ids": chosen, "rejected_ids": rejected}
        return {
            "chosen_ids": chosen[:start] + chosen[start + surplus :],
            "rejected_ids": rejected[:start] + rejected[start + surplus :],
        }


def without_equal_tokens(dataset: Any, role: str) -> Any:
    """Drop pairs whose sides have equal tokens, as texts with unknown words may. Raise DataError if none is left."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(lambda c, r: c != r, input_columns=_SIDES)
    maybe = rows_where(dataset, _SIDES, lambda columns: maybe_equal(*columns.values()))
    if not (equal := {row for row, sides in maybe if sides["chosen_ids"] == sides["rejected_ids"]}):
        return dataset
    what = f"{role}: {len(equal)} of {len(dataset)} pairs have the same tokens on both sides"
    if len(equal) == len(dataset):
        raise DataError(f"{what}, so none is left. Check that the tokenizer knows the words.")
    logger.warning(f"{what}, and are left out.")
    return dataset.select([row for row in range(len(dataset)) if row not in equal])


def add_shared_tokens(dataset: Any) -> Any:
    """Add the column `shared_tokens` if it is missing."""
    if SHARED in (dataset.column_names or ()):
        return dataset
    return _apply(dataset.map, lambda c, r: {SHARED: num_shared_tokens(c, r)}, dataset, "Comparing the sides", _SIDES)


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


def _apply(
    method: Callable[..., Any], function: Any, dataset: Any, desc: str, columns: list[str] | None = None
) -> Any:
    # A stream's map and filter take no description.
    options = {"desc": desc} if isinstance(dataset, Dataset) else {}
    return method(function, **options, **({"input_columns": columns} if columns else {}))


def lengths(dataset: Dataset, column: str) -> list[int]:
    """Return the number of tokens in every row of a column, without loading the token ids as lists."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return [n for table in tables for n in pc.list_value_length(table[column]).to_pylist()]


def _num_longer(dataset: Dataset, max_length: int) -> int:
    """Return the number of pairs with a side longer than `max_length`."""
    both = zip(lengths(dataset, "chosen_ids"), lengths(dataset, "rejected_ids"), strict=True)
    return sum(max(pair) > max_length for pair in both)


def _report(role: str, total: int, num_dropped: int, num_long: int, max_length: int, policy: str) -> None:
    if num_long > num_dropped:
        logger.warning(
            f"{role}: the prompts of {num_long - num_dropped} of {total} pairs are cut to max_length={max_length}."
        )
    if not num_dropped:
        return
    too_long = f"{num_dropped} of {total} pairs have a side longer than max_length={max_length} tokens"
    if num_dropped == total:
        raise DataError(f"{role}: {too_long}, so none is left. Raise max_length.")
    if policy == "truncate_prompt":
        advice = "although their prompts may be cut; they are dropped. Raise max_length to keep them."
    else:
        advice = 'and are dropped. Raise max_length, or set max_length_policy="truncate_prompt" to keep their answers.'
    logger.warning(f"{role}: {too_long}, {advice}")

"""Pairs whose better side is named by a column: `columns: {chosen: a, rejected: b, better: winner}`.

The numbers 0 and 1 mean the first side (`chosen`) and the second (`rejected`). Where a negative number occurs,
negative X"""

import re
from typing import Any

from datasets import Dataset
from transformers.utils import logging

from trl_ext.errors import ConfigError
from trl_ext.trainers.rows.sentence import refuse

logger = logging.get_logger(__name__)

BETTER = "better"
_SIDES = ("chosen", "rejected")
_FIRST, _SECOND, _TIE, _UNREAD = "first", "second", "tie", "unread"
_MAY_NAME_IT = re.compile("better|winner|prefer|^labels?$")


def put_better_first(dataset: Any, names: tuple[str, str], theirs: str, role: str) -> Dataset:
    """Return pairs whose chosen side is the better one by the column `better`, which is dropped, and so are ties.

    Args:
        names: The data's names of the first and the second side.
        theirs: The data's name of the column, for messages.

    Raises:
        ConfigError: The dataset is a stream.
        DataError: A value names no side, or every pair is a tie.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigError("columns: {better: ...} reads the whole column: set dataset_streaming to false.")
    values = dataset[BETTER][:]
    is_signed = min((value for value in values if isinstance(value, int | float)), default=0) < 0
    better = [_better_side(value, names, is_signed) for value in values]
    if _UNREAD in better:
        rows = [row for row, side in enumerate(better) if side == _UNREAD]
        problem = f"{values[rows[0]]!r} as '{theirs}', which names neither side"
        advice = (
            "Read are 0 and 1, or numbers of which the negative ones mean the first side, a and b, and the names "
            f"{names[0]} and {names[1]}."
        )
        refuse({problem: rows}, role, advice)
    ties = [row for row, side in enumerate(better) if side == _TIE]
    if len(ties) == len(better):
        refuse({f"a tie as '{theirs}'": ties}, role, "No pair is left to train on.")
    if ties:
        logger.warning(f"{role}: {len(ties)} of {len(better)} pairs are ties by '{theirs}', and are dropped.")
    dataset = dataset.map(lambda row, number: _swap(row) if better[number] == _SECOND else row, with_indices=True)
    return dataset.remove_columns(BETTER).select([row for row, side in enumerate(better) if side != _TIE])


def warn_of_unread_side(columns: list[str], role: str) -> None:
    """Warn of a column that may name the better side, where the recipe names the sides and not this column."""
    if found := [name for name in columns if _MAY_NAME_IT.search(name.lower())]:
        logger.warning(
            f"{role} has the column '{found[0]}'. If it names the better side, chosen is not always that side: "
            f"columns: {{..., better: {found[0]}}} puts it first."
        )


def _better_side(value: Any, names: tuple[str, str], is_signed: bool) -> str:
    if isinstance(value, str):
        text = value.strip().lower()
        if text in (name.lower() for name in names):
            return _FIRST if text == names[0].lower() else _SECOND
        if text.startswith(("tie", "both")):
            return _TIE
        return {"a": _FIRST, "b": _SECOND}.get(re.split("[_ ]", text)[-1], _UNREAD)
    if not isinstance(value, int | float) or value != value:
        return _UNREAD
    if is_signed:
        return _TIE if value == 0 else _FIRST if value < 0 else _SECOND
    return {0.0: _FIRST, 1.0: _SECOND}.get(value, _UNREAD)


def _swap(row: dict[str, Any]) -> dict[str, Any]:
    return row | dict(zip(_SIDES, (row[side] for side in reversed(_SIDES)), strict=True))

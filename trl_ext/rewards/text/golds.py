"""Read a gold column's cell, which may hold several accepted answers, and choose the best of their verdicts."""

import re
from collections.abc import Iterable
from numbers import Number
from typing import Any

from trl_ext.rewards.base.rule import Verdict

_MIXED = re.compile(r"(-?[0-9]{1,30})\s?\(([0-9]{1,30})/([0-9]{1,30})\)")
_IN_BRACKETS = re.compile(r"\((-?[0-9./\s]{1,60})\)")
_UNIT = re.compile(r"(-?[0-9][0-9.,/]{0,60})\s?\((?!mod)([A-Za-z][A-Za-z /.'-]{1,40})\)")


def without_brackets(text: str) -> str:
    """Return a gold column's mixed number `4(4/5)`, `(1/10)` or `9 (apples)` as LaTeX; other texts unchanged.

    Example:
        >>> without_brackets("4(4/5)"), without_brackets("(1/10)"), without_brackets("f(2)")
        ('4\\\\frac{4}{5}', '1/10', 'f(2)')
    """
    if (bare := text.strip()).endswith(")"):
        if found := _MIXED.fullmatch(bare):
            return f"{found[1]}\\frac{{{found[2]}}}{{{found[3]}}}"
        if found := _IN_BRACKETS.fullmatch(bare):
            return found[1]
        if found := _UNIT.fullmatch(bare):
            return f"{found[1]} \\text{{{found[2]}}}"
    return text


def golds_of(cell: Any) -> list[str] | None:
    """Return the accepted answers of a gold cell as texts, each once; None if the cell holds no answer.

    A text or a number is one answer. Each entry of a list is an accepted answer, except null, NaN and blank entries.

    Example:
        >>> golds_of("4"), golds_of(["NYC", "New York", None]), golds_of({"a": 1})
        (['4'], ['NYC', 'New York'], None)
    """
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(cell, list | tuple):
        return [str(cell)] if _is_answer(cell) else None
    return list(dict.fromkeys(str(entry) for entry in cell if _is_answer(entry) and str(entry).strip())) or None


def _is_answer(cell: Any) -> bool:
    return isinstance(cell, str | Number) and not isinstance(cell, bool) and cell == cell


def best(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the best of one answer's verdicts, one per accepted gold; stop at a 1.0.

    A verdict of 1.0 is the best, then "undecided": the answer may equal a gold that cannot be compared. A gold that
    cannot be read counts only if no gold can.
    """
    found = None
    for verdict in verdicts:
        if verdict.value is not None and verdict.value >= 1.0:
            return verdict
        if found is None or _rank(verdict) > _rank(found):
            found = verdict
    assert found is not None, "there is at least one gold"
    return found


def _rank(verdict: Verdict) -> tuple[int, float]:
    if verdict.value is not None:
        return 1, verdict.value
    return (2 if verdict.status == "undecided" else 0), 0.0

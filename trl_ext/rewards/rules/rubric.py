"""Judge an answer by a model and a list of weighted criteria, of the rule or of each row.

Criteria have the form of HealthBench (`criterion`, `points`, `tags`) or of Rubrics as Rewards (`description`,
`weight`, `title`), in YAML or in a column.
"""

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from trl_ext.rewards.base.rule import Row, Verdict, check_choice, is_finite
from trl_ext.rewards.rules.async_rule import content_key
from trl_ext.rewards.rules.model_judge import JudgeReply, JudgeRequest, ModelJudge, Shown, shipped_schema
from trl_ext.rewards.text.prose import is_blank
from trl_ext.rewards.totals.composition import shortened

_MOST_CRITERIA, _MOST_CHARS = 100, 5000
_KEYS = {"criterion", "description", "points", "weight", "title", "tags", "veto"}


class Criterion(NamedTuple):
    """A criterion: its text, its points if it is met, its names in the log, and True for a veto."""

    text: str
    points: float
    labels: tuple[str, ...]
    veto: bool


@dataclass(frozen=True, slots=True)
class Rubric(ModelJudge):
    """Points of the criteria that are met divided by all positive points, clipped to 0..1.

    HealthBench's score of an answer (arXiv:2505.08775, section 2), which clips only the mean of all answers. A met
    criterion with negative points subtracts them. The value is 0.0 if a `veto` is not met, or a `veto` with negative
    points is met. A reply without a verdict on each criterion is `no_score`, a row with unreadable criteria is
    `gold_invalid`. See `judge` for the rest.

    Args:
        criteria: A list of criteria, or the column with each row's list. A criterion is a text with 1 point, or
            `{criterion: text, points: 5, title: name, tags: [...], veto: false}`; `description` and `weight` are
            other names of the first two keys.
        calls: "one" asks about all criteria in one call, "each" makes a call per criterion.
    """

    judges_correctness: ClassVar[bool] = True
    _mode: ClassVar[str] = "rubric"

    criteria: Sequence[Any] | str = field(kw_only=True)
    calls: str = "one"

    def check(self) -> None:
        ModelJudge.check(self)
        check_choice(self, "calls", self.calls, ("one", "each"))
        if not self._column and (why := self._unread_criteria({})):
            self._refuse(f"{why}.")

    @property
    def _column(self) -> str:
        return self.criteria if isinstance(self.criteria, str) else ""

    @property
    def columns(self) -> tuple[str, ...]:
        shown = ModelJudge.columns.fget(self)  # type: ignore[attr-defined]
        return tuple(dict.fromkeys(filter(None, (*shown, self._column))))

    def unread(self, columns: Mapping[str, Any]) -> str:
        """Return the problem of the row's criteria, or a sentence about an empty column."""
        return self._unread_criteria(columns) or ModelJudge.unread(self, columns)

    def _unread_criteria(self, columns: Mapping[str, Any]) -> str:
        try:
            self._criteria(columns)
        except ValueError as error:
            return f"column '{self._column}': {error}" if self._column else f"criteria: {error}"
        return ""

    def _criteria(self, columns: Mapping[str, Any]) -> list[Criterion]:
        return criteria_of(columns.get(self._column)) if self._column else criteria_of(self.criteria, is_strict=True)

    def cache_key(self, row: Row) -> Hashable | None:
        cell = row.columns.get(self._column)
        return self._verdict_at_once(row) or content_key([[one.messages for one in self._requests(row)], cell])

    def _shown(self, row: Row, given: Mapping[str, Any]) -> Shown:
        criteria = self._criteria(row.columns)
        parts = [criteria] if self.calls == "one" else [[one] for one in criteria]
        return [({"criteria": _number(part)}, partial(_met, part)) for part in parts]

    def _schema_of(self, names: Mapping[str, Any]) -> Mapping[str, Any] | None:
        num_criteria = names["criteria"].count("\n") + 1
        return shipped_schema(self._mode, self.scores, map(str, range(1, num_criteria + 1))) if self.schema else None

    def _verdict(self, replies: Sequence[JudgeReply], requests: Sequence[JudgeRequest]) -> Verdict:
        found = [self._value(reply, asked) for reply, asked in zip(replies, requests, strict=True)]
        if None in found:
            return self._no_score([reply for reply, met in zip(replies, found, strict=True) if met is None])
        verdicts: list[tuple[Criterion, bool]] = [one for met in found for one in met]
        points = sum(one.points for one, is_met in verdicts if is_met)
        is_vetoed = any(one.veto and is_met == (one.points < 0) for one, is_met in verdicts)
        value = 0.0 if is_vetoed else points / sum(max(one.points, 0.0) for one, _ in verdicts)
        told = (
            f"{'met' if is_met else 'NOT met'}{' (veto)' * one.veto} {one.points:g}: {shortened(one.text, 60)}"
            for one, is_met in verdicts
        )
        parts = tuple((one.text, is_met, one.labels) for one, is_met in verdicts)
        return Verdict(min(max(value, 0.0), 1.0), "ok", "; ".join(told), parts)


def _number(criteria: Sequence[Criterion]) -> str:
    """Return the criteria as a numbered list, each on one line."""
    return "\n".join(f"{number}. {' '.join(one.text.split())}" for number, one in enumerate(criteria, 1))


def _met(criteria: Sequence[Criterion], said: Any) -> list[tuple[Criterion, bool]] | None:
    """Return each criterion with True if it is met by the reply; None if the reply omits a criterion."""
    numbers = [str(number) for number in range(1, len(criteria) + 1)]
    if not isinstance(said, Mapping) or not all(isinstance(said.get(number), bool) for number in numbers):
        return None
    return [(one, said[number]) for one, number in zip(criteria, numbers, strict=True)]


def criteria_of(entries: Any, is_strict: bool = False) -> list[Criterion]:
    """Read a list of texts and mappings as criteria; a ValueError names the criterion and its problem.

    `is_strict` is for criteria of the rule: an unknown key is an error, and each criterion is logged by its title or
    number. Criteria of a column are logged by their tags.
    """
    if not isinstance(entries, list | tuple) or not 0 < len(entries) <= _MOST_CRITERIA:
        raise ValueError(f"{shortened(repr(entries), 80)} is no list of 1 to {_MOST_CRITERIA} criteria")
    found = [_criterion_of(given, number, is_strict) for number, given in enumerate(entries, 1)]
    if not 0 < sum(max(one.points, 0.0) for one in found) < math.inf:
        raise ValueError("none has points above 0, so that no answer is better than another")
    return found


def _criterion_of(given: Any, number: int, is_strict: bool) -> Criterion:
    """Read the text or mapping of criterion `number`."""
    entry = {"criterion": given, "points": 1} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or (is_strict and not entry.keys() <= _KEYS):
        raise ValueError(f"number {number} is {shortened(repr(given), 80)}, which is no criterion")
    # `datasets` gives all entries of a column the same keys, with None for missing values.
    entry = {key: cell for key, cell in entry.items() if cell is not None}
    text = entry.get("criterion", entry.get("description"))
    if not isinstance(text, str) or is_blank(text) or len(text) > _MOST_CHARS:
        raise ValueError(f"number {number} has the criterion {shortened(repr(text), 80)}; give a text")
    points = _points_of(entry, number)
    tags, title, veto = entry.get("tags", ()), entry.get("title", number), entry.get("veto", False)
    if not isinstance(tags, list | tuple) or not isinstance(veto, bool):
        raise ValueError(f"number {number} is {shortened(repr(given), 80)}; tags is a list, veto true or false")
    labels = [re.sub(r"[^\w.:-]+", "_", str(label))[:60] for label in ((title, *tags) if is_strict else tags)]
    return Criterion(text, points, tuple(labels), veto)


def _points_of(entry: Mapping[str, Any], number: int) -> float:
    key = "points" if "points" in entry or "weight" not in entry else "weight"
    points: Any = entry.get(key)
    if not is_finite(points):
        raise ValueError(f"number {number} has {key}={points!r}; give a finite number")
    return float(points)

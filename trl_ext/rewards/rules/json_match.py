"""Judge whether the completion's JSON, or its tool calls, equal a gold."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_column, check_number, text_tuple
from trl_ext.rewards.rules.json_schema import (
    MAX_DEPTH,
    WHERE,
    compiled,
    json_text,
    library,
    nesting,
    read_json,
    strict_json,
)


@dataclass(frozen=True, slots=True)
class JsonMatch(Rule):
    """1.0 if the completion's JSON equals the gold, else 0.0; with `partial` the share of equal fields.

    Args:
        gold: Column with the gold, as JSON text (a mapping works too). `{"$fits": schema}` in it matches any value
            that fits the JSON schema.
        paths: JMESPath expressions; each is one field, and nothing else is compared. Empty: everything is compared,
            each key of an object is one field, and an extra key is wrong.
        where: "all", "last_block" or "either" as in `JsonSchema`; "tool_calls" reads the calls in the completion's
            messages, as a list of `{"name": ..., "arguments": ...}`.
        tolerance: Absolute or relative error that is allowed for numbers.
        ordered: False compares lists in any order.
        partial: True gives the share of fields.

    Example:
        >>> JsonMatch().score(Row(None, '{"a": 1.0, "b": []}', None, {"answer": '{"b": [], "a": 1}'})).value
        1.0
    """

    judges_correctness: ClassVar[bool] = True

    gold: str = "answer"
    paths: tuple[str, ...] = ()
    where: str = "either"
    tolerance: float = 0.0
    ordered: bool = True
    partial: bool = False

    def check(self) -> None:
        check_column(self, "gold", self.gold)
        check_choice(self, "where", self.where, (*WHERE, "tool_calls"))
        check_number(self, "tolerance", self.tolerance, "a number from 0 to below 1", lambda value: 0 <= value < 1)
        object.__setattr__(self, "paths", text_tuple(self, "paths", self.paths))
        try:
            for path in self.paths:
                library("jmespath").compile(path)
        except ValueError as error:
            raise RuleError(f"Rule '{self.name}': paths are no JMESPath: {error}. Correct them.") from error

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.gold,)

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        text = json_text(columns[self.gold])
        return None if "$fits" in text or self.where == "tool_calls" else text

    def score(self, row: Row) -> Verdict:
        try:
            gold = self._read_gold(row.columns[self.gold])
            due = self._due(gold)
        except (TypeError, ValueError, RecursionError) as error:
            return Verdict(None, "gold_invalid", f"column '{self.gold}': {error}"[:300])
        value = self._read_completion(row)
        if isinstance(value, Verdict):
            return value
        try:
            given = self._fields(value, gold)
        except ValueError:  # A function of a path does not take the value.
            given = {}
        names = due | given
        wrong = [key for key in names if key not in given or key not in due or not self._same(given[key], due[key])]
        share = 1.0 - len(wrong) / max(1, len(names))
        return Verdict(share if self.partial else float(not wrong), "ok", f"wrong: {', '.join(wrong) or 'none'}"[:300])

    def _read_gold(self, cell: Any) -> Any:
        gold = json.loads(json_text(cell), object_hook=_fitting)
        return [_call(call) for call in gold] if self.where == "tool_calls" else gold

    def _due(self, gold: Any) -> dict[str, Any]:
        """Return the gold's fields; ValueError if a completion cannot be compared with them."""
        due = self._fields(gold, gold)
        if self.paths and all(value is None for value in due.values()):
            raise ValueError("the paths find nothing")
        if self.where == "tool_calls" and any(call["name"] is None for call in gold):
            raise ValueError("a call has no name")
        return due

    def _read_completion(self, row: Row) -> Any:
        """Return the completion's JSON or tool calls, or the verdict on a completion without JSON."""
        if self.where == "tool_calls":
            turns = [turn for turn in row.messages if turn.get("role") == "assistant"]
            return [_call(call) for turn in turns for call in turn.get("tool_calls") or ()]
        read = read_json(self, row, self.where)
        return read if isinstance(read, Verdict) else read[1]

    def _fields(self, value: Any, gold: Any) -> dict[str, Any]:
        """Return the fields of a value: by path, by key if the gold is an object, else the whole value."""
        if self.paths:
            return {path: library("jmespath").search(path, value) for path in self.paths}
        if isinstance(gold, dict) and gold:
            return value if isinstance(value, dict) else {}
        return {"all": value}

    def _same(self, given: Any, gold: Any) -> bool:
        """Return True for equal values: 1 equals 1.0 but not true; keys have no order, lists if `ordered`."""
        if isinstance(gold, dict) and isinstance(given, dict):
            return given.keys() == gold.keys() and all(self._same(given[key], gold[key]) for key in gold)
        if isinstance(gold, list) and isinstance(given, list):
            if self.ordered or len(given) != len(gold):
                return len(given) == len(gold) and all(map(self._same, given, gold))
            places = set(range(len(given)))
            for due in gold:
                places.discard(next((i for i in places if self._same(given[i], due)), -1))
            return not places
        if hasattr(gold, "is_valid"):
            return bool(gold.is_valid(given))
        if {type(given), type(gold)} <= {int, float} and self.tolerance and max(abs(given), abs(gold)) < 1e300:
            return math.isclose(given, gold, rel_tol=self.tolerance, abs_tol=self.tolerance)
        return bool(given == gold) and isinstance(given, bool) == isinstance(gold, bool)


def _fitting(value: dict[str, Any]) -> Any:
    """Return the validator for `{"$fits": schema}`; any other object unchanged."""
    return compiled(json.dumps(value["$fits"]), formats=False) if value.keys() == {"$fits"} else value


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call's name and arguments, read from JSON text if they are such text."""
    call = call.get("function", call) if isinstance(call, dict) else {}
    call = call if isinstance(call, dict) else {}
    arguments = call.get("arguments")
    with suppress(ValueError):
        if isinstance(arguments, str) and nesting(arguments) <= MAX_DEPTH:
            arguments = strict_json(arguments)
    return {"name": call.get("name"), "arguments": arguments}

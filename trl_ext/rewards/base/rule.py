"""The base of all rules: a rule reads one row and gives a verdict.

A bad completion is data: it gets the rule's floor and a status with the reason. If the rule cannot read or compare the
gold answer, the verdict has no value, and TRL leaves the row out of the advantages. An exception is a bug in the rule,
and RuleSet turns it into a RuleError that names the row.
"""

import math
import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import iscoroutinefunction
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from trl_ext.errors import RuleError


@dataclass(frozen=True, slots=True)
class Row:
    """The input of a rule: one completion and its data.

    Args:
        prompt: A string or a message list, as TRL passes it.
        text: The completion as text (see `completion_text`).
        completion_ids: Its token ids; None if the caller has none.
        columns: This row's values of the dataset's other columns.
        messages: The completion's turns, with tool calls and tool results; a plain text is one turn of the assistant.
            An assistant's `reasoning_content` is separate from its `content`.
        group: The other completions of the same prompt in this batch, as rows without a group. Reading it is an error
            unless the rule has `reads_group = True`.
        step: Optimizer steps that the training has done; None without a training.
        prompt_end: How the chat template ends a prompt of messages, such as "...<|assistant|><think>"; "" if unknown.
    """

    prompt: Any
    text: str
    completion_ids: tuple[int, ...] | None
    columns: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] = ()
    group: tuple["Row", ...] = ()
    step: int | None = None
    prompt_end: str = ""


class UnreadGroup(tuple[Row, ...]):
    """The group of a row for rules without `reads_group`. Reading it is an error, because it would seem empty."""

    __slots__ = ()

    def _refuse(self, *_: object) -> Any:
        raise RuleError("This rule reads row.group without declaring it. Write reads_group = True in its class.")

    __iter__ = __len__ = __getitem__ = __contains__ = __bool__ = _refuse

    def __reduce__(self) -> str:
        return "UNREAD"


UNREAD = UnreadGroup()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule's judgement of one row.

    `value` is None only if the row's data or the machine prevents a judgement: None takes a row out of training, which
    in GRPO is better than a wrong answer, so a completion must never be able to cause it. Statuses of shipped rules:

        ok            judged
        no_answer     the completion has nothing to judge; the floor
        conflict      the completion has several answers; the floor
        timeout       the completion took too long to judge; the floor
        too_long      the completion or its answer is longer than the rule reads; the floor
        too_complex   the form of the answer means a long time, or it took too much memory or stack; the floor
        gold_invalid  the gold answer cannot be read; no value
        undecided     the rule cannot compare this kind of gold answer; no value. An answer with the gold's exact text
                      earns the full value, a missing answer the floor
        crashed       the row ended the worker that judged it; the floor
        infra_error   the machine failed, not the completion: a worker did not start, a service is away; no value
        refused       the judge's server refused the request; the floor, because a completion can cause it
        no_score      the judge's reply does not have the requested form; the floor
        error         the rule raised, and `on_error` lets the run go on; the floor
        not_finite    the rule gave NaN, infinity or more than `RuleSet` allows; the floor
        skipped       the rule's `when` excludes this row; no value
        gated         another rule's verdict takes this rule out of the total

    Args:
        value: The reward before weight and gate; None takes the row out of training.
        status: A word of the list above, or another word of the rule.
        detail: The compared answers, or the reason for a missing value.
        parts: Parts of the value: a criterion, True if it is met, and the names under which this is logged.
    """

    value: float | None
    status: str = "ok"
    detail: str = ""
    parts: tuple[tuple[str, bool, tuple[str, ...]], ...] = ()


def as_verdict(found: Any) -> Verdict:
    """Return the result of `score` as a verdict; a number or a truth value becomes its value.

    TypeError for anything else, also for None: a return may have been forgotten.
    """
    if not isinstance(found, Verdict):
        if not isinstance(found, bool | Real):
            raise TypeError(f"score() returned {found!r:.200}, not a Verdict or a number")
        return Verdict(float(found))
    if found.value is None or type(found.value) is float:
        return found
    return replace(found, value=float(found.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Base of all rules; its fields are the keys of a rule in a YAML file.

    Subclasses define `score` or `score_batch`, `columns` if they read any, and `check` if a field can be wrong.

    Examples:
        >>> class Polite(Rule):
        ...     def score(self, row):
        ...         return "please" in row.text
        >>> Polite(weight=0.5).name
        'polite'

    Args:
        weight: Factor of the value in the total.
        gate: Name of another rule of the set. This rule counts only if the value of the other rule is at least 1.0. Or
            `{"rule": name, "status": status}`, stored as "name:status": only if its verdict has this status.
        scale: Two values of the rule that become 0 and 1; all others change in proportion. None: no change.
        clip: Lowest and highest value, after `scale`.
        when: Columns and the value, or list of values, that they must have; other rows are not judged by this rule.
        name: Metric key and table heading. Empty: the class name in snake case.
    """

    floor: ClassVar[float] = 0.0  # Value of a failure that the model caused: the lowest value.
    ceiling: ClassVar[float] = 1.0  # The highest value.
    judges_correctness: ClassVar[bool] = False  # True: it judges right or wrong. False: it judges the form.
    # "worker": runs in a process that is killed when the rule hangs, crashes or uses too much memory. "inline": runs
    # in the caller's process, for rules that take bounded time on any text.
    tier: ClassVar[str] = "worker"
    blank: ClassVar[str] = ""  # A completion that does nothing; `audit` checks that it does not earn the ceiling.
    is_async: ClassVar[bool] = False  # True for AsyncRule, whose `score` is awaited.
    # True: `score` reads `row.group`, which is built, and copied into workers, for such rules only.
    reads_group: ClassVar[bool] = False

    weight: float = 1.0
    gate: str | Mapping[str, str] | None = None
    scale: tuple[float, float] | None = None
    clip: tuple[float, float] | None = None
    when: Mapping[str, Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", snake_case(type(self).__name__))
        kind = type(self)
        if kind.score is Rule.score and kind.score_batch is Rule.score_batch:
            raise RuleError(f"{kind.__name__} is abstract. Give it score(row), or score_batch(rows) for many at once.")
        if iscoroutinefunction(kind.score) != kind.is_async:
            fix = "Write async def score(self, row)" if kind.is_async else "Derive the class from AsyncRule"
            raise RuleError(f"{kind.__name__} and its score() do not agree on whether it is awaited. {fix}.")
        check_name("A rule", self.name)
        check_number(self, "weight", self.weight)
        owner = f"Rule '{self.name}'"
        for key in ("scale", "clip"):
            object.__setattr__(self, key, pair_of(owner, key, getattr(self, key)))
        gate = self.gate
        if isinstance(gate, Mapping):  # stored as "name:status": only this status opens it
            if gate.keys() != {"rule", "status"} or not all(isinstance(part, str) and part for part in gate.values()):
                raise RuleError(f"{owner} has the gate {dict(gate)}. Write {{rule: math, status: undecided}}.")
            object.__setattr__(self, "gate", f"{gate['rule']}:{gate['status']}")
        elif gate is not None and not isinstance(gate, str):
            raise RuleError(
                f"{owner} has the gate {gate!r}. Give a rule's name, or {{rule: math, status: undecided}}."
            )
        object.__setattr__(self, "when", conditions_of(owner, self.when))
        for item in fields(self):
            if item.type in (bool, "bool"):
                check_flag(self, item.name, getattr(self, item.name))
        self.check()

    def check(self) -> None:
        """Raise RuleError for wrong fields. Called when the rule is built."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Dataset columns that `score` reads."""
        return ()

    @property
    def ideal_columns(self) -> tuple[str, ...]:
        """Dataset columns that only `ideal` reads: `audit` needs them, a training does not."""
        return ()

    @property
    def all_columns(self) -> tuple[str, ...]:
        """Dataset columns that `score` and `when` read."""
        return (*self.columns, *(name for name in self.when or () if name not in self.columns))

    def warm_up(self) -> None:
        """Import the libraries of `score` before workers are forked, so that no row's time limit includes it."""

    def cache_key(self, row: Row) -> Hashable | None:
        """Return a key of everything that the verdict depends on, or None to cache no verdicts.

        A rule that returns gold and answer judges equal answers of a group once. A rule that reads `row.group`,
        `row.step` or `row.messages` puts them into the key.
        """
        return None

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        """Return a completion that must earn the ceiling, made from the row's gold; None if there is none.

        `audit` and `redteam` test rules with it. It contains the gold's text and not the rule's reading of it, so that
        a wrong reading is found.
        """
        return None

    def score(self, row: Row) -> Verdict | float:
        """Judge one row: return a verdict, or only its value (a number, True or False).

        It must be a pure function of the row; RuleSet calls it from several threads.
        """
        return self.score_batch([row])[0]

    def score_batch(self, rows: Sequence[Row]) -> list[Verdict]:
        """Judge several rows and return one verdict each, in their order.

        A rule that is faster on many rows overrides it. RuleSet then passes all rows of the rule, equal rows once
        (`cache_key`), in this process, without the workers' limits and whatever `tier` is.
        """
        return [as_verdict(self.score(row)) for row in rows]


def ideal_of(rule: Rule, columns: Mapping[str, Any], index: int) -> str | None:
    """Return the rule's ideal completion of a row; a RuleError names the row."""
    try:
        return rule.ideal(columns)
    except Exception as error:
        what = f"ideal() raised {type(error).__name__}: {error}"
        raise RuleError(f"Rule '{rule.name}': {what} (row {index}).") from error


def place_of(error: BaseException) -> str:
    """Return the file and line that raised the error."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(place.filename).name} line {place.lineno}"


def snake_case(name: str) -> str:
    """Return a class name in snake case: `SoftLength` becomes `soft_length`, `HTMLTags` becomes `html_tags`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_name(owner: str, name: Any) -> None:
    """Raise RuleError for a name that cannot be part of a metric key: a slash or a space would split the key."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise RuleError(f"{owner} is named {name!r}. Give a name of letters, digits, '_', '-' and '.'.")


def is_finite(value: Any) -> bool:
    """Return True for a finite number; False for anything else, also for a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def check_number(
    rule: Rule, key: str, value: Any, wanted: str = "a finite number", fits: Callable[[float], bool] = math.isfinite
) -> None:
    """Raise RuleError unless `value` is a finite number that fits.

    Args:
        rule: The rule, for the message.
        key: Name of the setting, for the message.
        value: Value of the setting.
        wanted: Description of the numbers that fit, for the message.
        fits: Returns True for a finite number that fits.
    """
    if not (is_finite(value) and fits(value)):
        # YAML 1.1 reads 1e-3 as text because it has no dot.
        hint = " (in YAML write 0.001 or 1.0e-3, not 1e-3)" if isinstance(value, str) else ""
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give {wanted}{hint}.")


def check_whole(rule: Rule, key: str, value: Any, least: int = 0) -> None:
    """Raise RuleError unless `value` is a whole number of at least `least`.

    Args:
        rule: The rule, for the message.
        key: Name of the setting, for the message.
        value: Value of the setting.
        least: The smallest valid number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give a whole number of at least {least}.")


def check_choice(rule: Rule, key: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise RuleError unless `value` is among `choices`.

    Args:
        rule: The rule, for the message.
        key: Name of the setting, for the message.
        value: Value of the setting.
        choices: The valid texts.
    """
    if value not in choices:
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give one of {', '.join(map(repr, choices))}.")


def check_texts(rule: Rule, *keys: str) -> None:
    """Raise RuleError unless these settings of a rule are texts, which may be empty."""
    for key in keys:
        if not isinstance(getattr(rule, key), str):
            raise RuleError(f"Rule '{rule.name}': {key} is {getattr(rule, key)!r}. Give a text.")


def check_flag(rule: Rule, key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give true or false.")


def check_set_key(key: str, value: Any) -> None:
    """Raise RuleError unless `value` can be the setting `key` of a set of rules."""
    choices = {"on_error": ("stop", "floor"), "on_unscored": ("error", "warn")}.get(key)
    if choices and value not in choices:
        raise RuleError(f"{key} is {value!r}. Give one of {', '.join(map(repr, choices))}.")
    if key in ("isolate", "normalise") and not isinstance(value, bool):
        raise RuleError(f"{key} is {value!r}. Give true or false, without quotes.")
    if key == "name":
        check_name("A rule set", value)
    if key == "clip":
        pair_of("The set", key, value)


def check_column(rule: Rule, key: str, value: Any) -> None:
    """Raise RuleError unless `value` can be the name of a dataset column."""
    if not isinstance(value, str) or not value:
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give the name of a dataset column.")


def text_tuple(rule: Rule, key: str, value: Any) -> tuple[str, ...]:
    """Read a list (YAML) or tuple (Python) of strings, or raise RuleError."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item.strip() for item in value):
        raise RuleError(f"Rule '{rule.name}': {key} is {value!r}. Give a list of strings that are not blank.")
    return tuple(value)


def applies(when: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> bool:
    """Return True if each column named in `when` has one of the values given there: the rule judges this row."""
    if not when:
        return True
    return all(columns.get(name) in wanted for name, wanted in when.items())


def pair_of(owner: str, key: str, value: Any) -> tuple[float, float] | None:
    """Check a pair of finite numbers, the lower one first, or raise RuleError; None stays None."""
    if value is None:
        return None
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not all(map(is_finite, pair)):
        raise RuleError(f"{owner}: {key} is {value!r}. Give two finite numbers, such as (-1, 1).")
    if pair[0] >= pair[1]:
        raise RuleError(f"{owner}: {key} is {value!r}. Give the lower bound first.")
    return float(pair[0]), float(pair[1])


def conditions_of(owner: str, value: Any) -> dict[str, tuple[Any, ...]] | None:
    """Read `{"task": "math"}` or `{"task": ["math", "logic"]}` as tuples of values, or RuleError; None stays None."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise RuleError(f"{owner}: when is {value!r}. Give columns with their values, such as {{'task': 'math'}}.")
    return {name: tuple(v) if isinstance(v, list | tuple) else (v,) for name, v in value.items()}

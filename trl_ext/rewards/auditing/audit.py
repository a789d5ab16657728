"""Test whether rules and data fit: on each row its gold must earn the ceiling, and the golds of other rows must not.

If a rule cannot read a gold, the row is lost for training; if it reads a gold wrongly, the policy learns a wrong
answer. The audit finds both before a model is loaded. `test` tests a rule on examples of completions instead.
"""

import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trl_ext.errors import ConfigError, DataError, RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, ideal_of
from trl_ext.rewards.pairs import chunks
from trl_ext.rewards.rules.answer import Answer
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.ruleset import RuleSet, require_columns
from trl_ext.rewards.totals.composition import shortened
from trl_ext.rewards.totals.scorer import Scorer

_MAX_FAILURES = 100  # kept per rule; all are counted

_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
ANNOUNCED = re.compile(r"(?s)<answer>(.*)</answer>|\\boxed\{(.*)\}|The answer is (.*)")
# The forms in which models announce answers.
FORMS = {
    "box": "\\boxed{{{}}}",
    "tag": "<answer>{}</answer>",
    "tag with dollars": "<answer>${}$</answer>",
    "The answer is": "The answer is {}.",
    "Answer:": "Answer: {}",
}
# Kinds of failure, in the order of the table, each with the row's failure.
FAULTS = {
    "unreadable": "its gold cannot be read",
    "blank": "a completion that does nothing earns {value}",
    "wrong": "its gold earns {value} against itself",
    "own_text": "only its own text is right: {completion} earns {value}",
    "accepted": "the gold of row {other} earns {value} too",
    "alike": "the gold of row {other} earns {value} too, and the other way round",
    **dict.fromkeys(FORMS, "its gold earns {value} as {completion}"),
}
# Golds of equal meaning in other words are rare; a rule that cannot distinguish golds finds more than this share.
_MAX_ALIKE_FRAC = 0.01

_SHOWN = 3  # failures of a kind in the table
_HEADINGS = ("rule", "rows", "right", "unreadable", "own text", "not asked", "other golds", "accepted", "alike")


@dataclass(frozen=True, slots=True)
class Failure:
    """A wrong verdict.

    Args:
        kind: One of FAULTS.
        row: Number of the judged row, from 0.
        other: Number of the row whose gold was the completion; None if it was the same row.
    """

    kind: str
    row: int
    other: int | None
    completion: str
    value: float | None
    status: str
    detail: str

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:g}"
        what = FAULTS[self.kind].format(value=value, other=self.other, completion=shortened(self.completion, 60))
        return f"row {self.row}: {what} ({self.status}: {shortened(self.detail)})"


@dataclass(frozen=True, slots=True)
class RuleAudit:
    """The counts of one rule over the data.

    Args:
        num_rows: Rows to which it applies (`when`).
        num_right: Rows whose gold earned the ceiling on its row.
        num_unreadable: Rows whose gold it cannot read (`gold_invalid`): lost for training.
        num_own_text: Rows whose gold can be compared only with an equal text, so that other answers are undecided:
            lost for training.
        num_blank: Rows on which a completion that does nothing earned the ceiling, such as tests that test nothing.
        num_not_asked: Rows for which it cannot name a right completion (`Rule.ideal`).
        num_compared: Golds of other rows that were judged.
        num_accepted: Compared golds that earned the ceiling, but not in the other direction.
        num_alike: Compared golds that earned the ceiling in both directions: the rule takes them for the same.
        forms: Golds that it pays, and does not pay, in each of FORMS; {} for a rule that reads no announced answers.
        lost_rows: Numbers of all rows whose gold is unreadable or undecided, to leave out of the data.
        failures: The first hundred failures.
    """

    rule: str
    num_rows: int
    num_right: int
    num_unreadable: int
    num_blank: int
    num_own_text: int
    num_not_asked: int
    num_compared: int
    num_accepted: int
    num_alike: int
    forms: dict[str, tuple[int, int]]
    lost_rows: tuple[int, ...]
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """True if every audited gold, of one row or more, can be read, is right there, and can be compared."""
        all_right = self.num_right + self.num_not_asked == self.num_rows
        all_right = all_right and self.num_rows > 0 and not self.num_own_text and not self.num_blank
        return all_right and not self.num_accepted and self.num_alike <= _MAX_ALIKE_FRAC * self.num_compared

    def cells(self) -> tuple[str, ...]:
        """Return the rule's line of the table."""
        lost = f"{self.num_unreadable} ({self.num_unreadable / max(self.num_rows, 1):.1%})"
        counts = (self.num_own_text, self.num_not_asked, self.num_compared, self.num_accepted, self.num_alike)
        return self.rule, str(self.num_rows), str(self.num_right), lost, *map(str, counts)

    def form_cells(self) -> tuple[str, ...]:
        """Return the rule's line of the table of forms."""
        counts = map(self.forms.get, FORMS)
        return self.rule, *("-" if count is None else f"{count[0]} paid, {count[1]} not" for count in counts)

    def first_failures(self) -> Iterator[str]:
        """Yield sentences about the first rows of each kind of failure."""
        for kind in FAULTS:
            found = [failure for failure in self.failures if failure.kind == kind]
            yield from (f"{self.rule}, {failure}" for failure in found[:_SHOWN])


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The report of `audit`; `print(report)` gives a table.

    Args:
        rules: One entry per rule that judges correctness.
    """

    rules: tuple[RuleAudit, ...]
    num_rows: int

    @property
    def ok(self) -> bool:
        """True if all rules are ok."""
        return all(rule.ok for rule in self.rules)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        remarks: list[str] = []
        for rule in self.rules:
            if not rule.num_rows:
                remarks.append(f"{rule.rule}: its `when` fits no row.")
            if rule.num_not_asked:
                tested = "only that they can be judged, and that doing nothing is not right, was tested"
                remarks.append(f"{rule.rule}, {rule.num_not_asked} rows name no right completion: {tested}.")
            remarks += rule.first_failures()
        verdict = "ok: every gold is read as itself, and none is lost" if self.ok else "not ok: look at the rows below"
        lines = [_HEADINGS, *(rule.cells() for rule in self.rules)]
        forms = [("each gold's own text as", *FORMS), *(rule.form_cells() for rule in self.rules if rule.forms)]
        tables = [table(lines), ""] + ([table(forms), ""] if len(forms) > 1 else [])
        return "\n".join([*tables, verdict, *remarks])


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, each column as wide as its widest cell."""
    widths = []
    for column in range(len(lines[0])):
        widths.append(max(len(line[column]) for line in lines))
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def audit(rules: RuleSet, dataset: Any, others: int = 3, seed: int = 0) -> AuditReport:
    """Judge the gold of each row, and golds of other rows, on that row, with every rule that judges correctness.

    Args:
        rules: The set; its limits, isolation and `on_error` apply.
        dataset: A `datasets.Dataset` or a list of mappings.
        others: Number of golds of other rows that each row must refuse. Golds that are equal as texts or plain numbers
            are left out. Two golds that accept each other may mean the same: a fault only if it happens often.
        seed: Seed of the choice of others.

    Raises:
        ConfigError: No rule judges correctness, or none can name a right completion.
        DataError: The data has no rows, or lacks a column.
        RuleError: A rule raised.
    """
    if isinstance(others, bool) or not isinstance(others, int) or others < 0:
        raise ConfigError(f"others is {others!r}. Give a whole number of at least 0.")
    judging = [rule for rule in rules.rules if rule.judges_correctness]
    if not judging:
        names = ", ".join(f"'{rule.name}'" for rule in rules.rules)
        raise ConfigError(f"None of the rules {names} judges correctness: there is no gold to audit. Add such a rule.")
    ideal_columns = [name for rule in judging for name in rule.ideal_columns]
    rows = data_rows(dataset, rules, ("prompt", *ideal_columns))
    for name in ideal_columns:
        if name not in rows[0]:
            raise DataError(f"The data lacks the column '{name}', which a rule names for its audit. Take it out.")
    found = tuple(_Run(rules, rule, rows).audit(others, seed) for rule in judging)
    if all(
        entry.num_not_asked == entry.num_rows and not rule.blank for rule, entry in zip(judging, found, strict=True)
    ):
        names = ", ".join(f"'{entry.rule}' on {entry.num_rows} rows" for entry in found)
        raise ConfigError(
            f"Nothing could be audited: {names}. Either a rule's `when` fits no row, or the rule cannot name which "
            "completion would be right. In your rule, override ideal(self, columns)."
        )
    return AuditReport(found, len(rows))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row's gold against the ideal completion of row `source`, the same row or another."""

    row: int
    source: int
    completion: str | None
    instead: str = ""  # Judged if the rule names no completion, to test whether the row can be judged at all.


class _Run:
    """The audit of one rule: counts of its verdicts, and the first failures."""

    def __init__(self, rules: RuleSet, rule: Rule, rows: list[dict[str, Any]]):
        self.rule, self.rows = rule, rows
        self.counts: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.lost_rows: list[int] = []
        is_text = getattr(rule, "kind", "") in ("exact", "qa")  # where a dollar is a part of the answer
        self.forms = [
            form for form in FORMS if isinstance(rule, Answer | Math) and not (is_text and "$" in FORMS[form])
        ]
        self._scorer = Scorer(rules.limits, rules.isolate, rules.on_error)
        self.ideals = [ideal_of(rule, row, index) for index, row in enumerate(rows)]

    def audit(self, num_others: int, seed: int) -> RuleAudit:
        """Audit the rule over all rows."""
        others = other_rows([None if ideal is None else gold_key(ideal) for ideal in self.ideals], num_others, seed)
        for numbers in chunks(range(len(self.rows)), f"Auditing '{self.rule.name}'", " rows"):
            # A row without a value for its own gold has none for other golds.
            valued = self._try_own(numbers)
            self._try_forms({row: ideal for row in valued if (ideal := self.ideals[row]) is not None})
            self._try_others([Comparison(row, other, self.ideals[other]) for row in valued for other in others[row]])
        counted = ("right", "unreadable", "blank", "own_text", "not_asked", "accepted", "alike")
        return RuleAudit(
            rule=self.rule.name,
            num_rows=sum(self.counts[name] for name in ("unreadable", "not_asked", "right", "wrong")),
            num_compared=sum(self.counts[name] for name in ("accepted", "alike", "refused")),
            forms={form: (self.counts["tried"] - self.counts[form], self.counts[form]) for form in self.forms},
            lost_rows=tuple(sorted(self.lost_rows)),
            failures=tuple(self.failures),
            **{f"num_{name}": self.counts[name] for name in counted},
        )

    def _try_own(self, numbers: Sequence[int]) -> list[int]:
        """Judge each row's own gold, and a completion that does nothing; return the rows whose gold has a value."""
        own = [Comparison(row, row, self.ideals[row], self.rule.blank) for row in numbers]
        verdicts = self._verdicts(own)
        self._add(own, verdicts)
        for entry, verdict in self._paid([Comparison(row, row, self.rule.blank) for row in numbers]):
            self._fail("blank", entry, verdict)
        return [row for row, verdict in zip(numbers, verdicts, strict=True) if verdict.value is not None]

    def _try_others(self, entries: list[Comparison]) -> None:
        """Judge golds of other rows, and those that earn the ceiling also in the other direction."""
        verdicts = self._verdicts(entries)
        pairs = list(zip(entries, verdicts, strict=True))
        # Golds that leave other answers undecided, each once.
        first = {entry.row: (entry, verdict) for entry, verdict in reversed(pairs) if verdict.status == "undecided"}
        for row, (entry, verdict) in sorted(first.items()):
            self.lost_rows.append(row)
            self._fail("own_text", entry, verdict)
        accepted = [entry for entry, verdict in pairs if earns_all(self.rule, verdict)]
        back = self._paid([Comparison(entry.source, entry.row, self.ideals[entry.row]) for entry in accepted])
        self._add(entries, verdicts, mutual={(entry.source, entry.row) for entry, _ in back})

    def _verdicts(self, entries: Sequence[Comparison]) -> list[Verdict]:
        if not entries:
            return []
        pairs = [(self.rows[entry.row], entry.completion or entry.instead) for entry in entries]
        rows = [Row(columns.get("prompt"), text, None, columns) for columns, text in pairs]
        try:
            (column,) = self._scorer.columns([self.rule], rows)
        except RuleError as error:
            first, last = entries[0].row, entries[-1].row
            raise RuleError(f"While auditing rows {first} to {last} of the data: {error}") from error
        return column.verdicts

    def _try_forms(self, ideals: Mapping[int, str]) -> None:
        """Judge the golds of rows in each form."""
        self.counts["tried"] += len(ideals)
        for form in self.forms:
            entries = [Comparison(row, row, FORMS[form].format(bare_answer(ideal))) for row, ideal in ideals.items()]
            for entry, verdict in zip(entries, self._verdicts(entries), strict=True):
                if not earns_all(self.rule, verdict):
                    self._fail(form, entry, verdict)

    def _paid(self, entries: Sequence[Comparison]) -> list[tuple[Comparison, Verdict]]:
        """Return the entries that earn the ceiling, with their verdicts."""
        pairs = zip(entries, self._verdicts(entries), strict=True)
        return [(entry, verdict) for entry, verdict in pairs if earns_all(self.rule, verdict)]

    def _add(
        self, entries: list[Comparison], verdicts: list[Verdict], mutual: Collection[tuple[int, int]] = ()
    ) -> None:
        """Count verdicts, and store failures; for the pairs of rows in `mutual` each gold accepts the other."""
        for entry, verdict in zip(entries, verdicts, strict=True):
            kind = "alike" if (entry.row, entry.source) in mutual else self._kind(entry, verdict)
            if kind == "unreadable":
                self.lost_rows.append(entry.row)
            if kind in FAULTS:
                self._fail(kind, entry, verdict)
            else:
                self.counts[kind] += 1

    def _fail(self, kind: str, entry: Comparison, verdict: Verdict) -> None:
        """Count a failure, and store the first hundred."""
        self.counts[kind] += 1
        if len(self.failures) < _MAX_FAILURES:
            failure = Failure(
                kind,
                entry.row,
                other=None if entry.source == entry.row else entry.source,
                completion=entry.completion or "",
                value=verdict.value,
                status=verdict.status,
                detail=verdict.detail,
            )
            self.failures.append(failure)

    def _kind(self, entry: Comparison, verdict: Verdict) -> str:
        is_right = earns_all(self.rule, verdict)
        if entry.source != entry.row:
            return "accepted" if is_right else "refused"
        if verdict.status in ("skipped", "gold_invalid", "undecided"):
            return "skipped" if verdict.status == "skipped" else "unreadable"
        if entry.completion is None:
            return "not_asked"
        return "right" if is_right else "wrong"


def bare_answer(ideal: str) -> str:
    """Return an ideal completion's answer, without its announcement."""
    announced = ANNOUNCED.fullmatch(ideal)
    return announced[announced.lastindex or 0] if announced else ideal


def earns_all(rule: Rule, verdict: Verdict) -> bool:
    return verdict.value is not None and verdict.value >= rule.ceiling


def gold_key(ideal: str) -> str:
    """Return the same key for golds that are equal as texts or plain numbers.

    Examples:
        >>> gold_key("The answer is  1,018.50") == gold_key("the answer is 1018.5")
        True
    """
    return " ".join(plain_numbers(ideal).casefold().split())


def plain_numbers(text: str) -> str:
    """Write numbers in one spelling: `1,018.50` becomes `1018.5`."""
    return _NUMBER.sub(_plain, text)


def _plain(number: re.Match[str]) -> str:
    whole, point, decimals = number[0].replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return f"{whole}{point}{decimals}" if decimals else whole


def other_rows(keys: Sequence[str | None], others: int, seed: int) -> list[list[int]]:
    """Draw up to `others` rows with different other keys for each row; none for a row without a key."""
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, row)
    chance, distinct = random.Random(seed), list(first)
    found = []
    for key in keys:
        drawn = chance.sample(distinct, min(others + 1, len(distinct))) if key is not None else []
        found.append([first[other] for other in drawn if other != key][:others])
    return found


def data_rows(dataset: Any, rules: RuleSet, more: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a Dataset or a list of mappings, with the columns that rules read and any of `more`.

    All rows have the same keys; a key that is missing in a row of a list has the value None there.

    Raises:
        DataError: A column that a rule reads is missing, or there are no rows.
    """
    wanted = dict.fromkeys((*more, *rules.columns))
    if hasattr(dataset, "column_names") and hasattr(dataset, "select_columns"):
        names = dataset.column_names or ()
        there = [name for name in wanted if name in names]
        rows = dataset.with_format(None).select_columns(there).to_list() if there else [{} for _ in dataset]
    elif isinstance(dataset, list | tuple) and all(isinstance(row, Mapping) for row in dataset):
        names = dict.fromkeys(name for row in dataset for name in row)
        there = [name for name in wanted if name in names]
        rows = [dict(zip(there, map(row.get, there), strict=True)) for row in dataset]
    else:
        raise DataError(f"The data is a {type(dataset).__name__}. Give a datasets.Dataset or a list of mappings.")
    if not rows:
        raise DataError("The data has no rows. Give at least one.")
    require_columns(rules.rules, dict.fromkeys(names))
    return rows


def test(
    rule: Rule,
    paid: Sequence[Any] = (),
    unpaid: Sequence[Any] = (),
    prompt: Any = "",
    columns: Mapping[str, Any] | None = None,
) -> None:
    """Judge completions by a rule as training does, and raise if any value is wrong.

    Args:
        paid: Completions (strings or message lists) that must earn the rule's highest value.
        unpaid: Completions that must earn at most its floor.
        prompt, columns: The prompt and the dataset's columns for all completions.

    Raises:
        AssertionError: Completions have the wrong value; the message has a line with the reason for each.
        ValueError: There are no examples.

    Example:
        >>> from trl_ext.rewards import Keywords
        >>> test(Keywords(required=("so",)), paid=["so it is"], unpaid=["it is"])
    """
    if not paid and not unpaid:
        raise ValueError("There are no examples. Give completions as paid or as unpaid.")
    rules = RuleSet([rule])
    wrong = []
    for completion, is_paid in [*((one, True) for one in paid), *((one, False) for one in unpaid)]:
        part = rules.explain(prompt, completion, **(columns or {})).parts[0]
        if part.value is None or (part.value < rule.ceiling if is_paid else part.value > rule.floor):
            asked = f"at least {rule.ceiling:g}" if is_paid else f"at most {rule.floor:g}"
            wrong.append(f"{completion!r:.100} earns {part.value}, not {asked}: {part.status}, {part.detail}")
    if wrong:
        raise AssertionError(f"Rule '{rule.name}':\n" + "\n".join(wrong))


# Otherwise pytest would collect it wherever it is imported.
test.__test__ = False  # type: ignore[attr-defined]

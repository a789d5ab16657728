"""The arithmetic of a RuleSet: from the verdicts of one row to its total, and its explanation for people.

    total = clip(sum of weight * value over the rules whose gate is open)

A gate is another rule. A rule counts only if its gate has the full value, or a given status: a judge may decide rows
that a rule leaves undecided. In groups that a model cannot solve only form varies, and it learns format or length
instead; a gate removes that reward if the answer is wrong. `outbid_warning` finds sets in which rules of form can add
as much as a right answer: a model takes the reward that is easiest to get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Rule, Verdict

# Position of a rule that is a gate, and the status that opens it; "": its value opens it.
Gate = tuple[int, str]
STATUSES = frozenset(
    "ok no_answer conflict timeout too_long too_complex gold_invalid undecided crashed infra_error refused no_score "
    "error not_finite skipped gated".split()
)
GATE_OPENS_AT = 1.0  # Least value of an open gate: the highest value of every shipped rule.
_HEADINGS = ("rule", "value", "status", "weight", "gated", "adds", "detail")


@dataclass(frozen=True, slots=True)
class Composed:
    """The combined verdicts of one row."""

    values: tuple[float | None, ...]  # of each rule, scaled and clipped
    states: tuple[str, ...]  # of each rule's gate: "open", "shut" or "unknown"
    contributions: tuple[float | None, ...]  # of each rule; None if the rule is left out
    total: float | None  # the clipped sum; None if no rule with a weight has a value


class Composition:
    """The rules, gates (`gate_chains`) and bounds of a set."""

    def __init__(self, rules: Sequence[Rule], clip: tuple[float, float] | None):
        self.rules, self.chains, self.clip = rules, gate_chains(rules), clip
        # Rules of weight 0 are measured only: by themselves they give no total.
        self.weighted = [place for place, rule in enumerate(rules) if rule.weight] or range(len(rules))

    def of(self, verdicts: Sequence[Verdict]) -> Composed:
        """Combine the verdicts of one row, one per rule."""
        values = tuple(map(shaped_value, self.rules, verdicts))
        states = tuple(gate_state(values, verdicts, chain) if chain else "open" for chain in self.chains)
        contributions = tuple(map(contribution, (rule.weight for rule in self.rules), values, states))
        weighted = map(contributions.__getitem__, self.weighted)
        known = [part for part in weighted if part is not None]
        total = sum(known, 0.0) if known else None
        if total is not None and self.clip is not None:
            total = min(max(total, self.clip[0]), self.clip[1])
        return Composed(values, states, contributions, total)

    def explained(self, verdicts: Sequence[Verdict], row: Composed) -> "Explanation":
        """Explain the total of one row."""
        parts = map(Part.of, self.rules, verdicts, row.states, row.contributions)
        return Explanation(tuple(parts), row.total, self.clip)


def shaped_value(rule: Rule, verdict: Verdict) -> float | None:
    """Return the verdict's value with the rule's scale and clip, or None."""
    value = verdict.value
    if value is not None and rule.scale is not None:
        value = (value - rule.scale[0]) / (rule.scale[1] - rule.scale[0])
    return value if value is None or rule.clip is None else min(max(value, rule.clip[0]), rule.clip[1])


def contribution(weight: float, value: float | None, state: str) -> float | None:
    """Return the amount that a value adds to the total with a gate in this state; None if it is left out."""
    if value is None or state == "unknown":
        return None
    return 0.0 if state == "shut" else weight * value


def gate_chains(rules: Sequence[Rule]) -> tuple[tuple[Gate, ...], ...]:
    """Return each rule's gate, the gate of its gate and so on; RuleError for unknown gates or statuses and circles."""
    positions = {rule.name: position for position, rule in enumerate(rules)}
    chains = []
    for rule in rules:
        chain: list[Gate] = []
        gate, status = gate_of(rule)
        while gate:
            if gate not in positions:
                raise RuleError(f"Rule '{rule.name}' has the gate '{gate}'. Give one of {', '.join(positions)}.")
            if positions[gate] in dict(chain) or gate == rule.name:
                raise RuleError(f"The gate of rule '{rule.name}' leads in a circle at '{gate}'. Take one gate out.")
            before = rules[positions[gate]]
            if status and status not in STATUSES and type(before).__module__.startswith("trl_ext."):
                raise RuleError(
                    f"The gate of rule '{rule.name}' waits for the status '{status}', which '{gate}' never has. Give "
                    f"one of {', '.join(sorted(STATUSES))}."
                )
            chain.append((positions[gate], status))
            gate, status = gate_of(before)
        chains.append(tuple(chain))
    return tuple(chains)


class NamedGate(NamedTuple):
    """The name of a gate rule, or "", and the status that opens the gate, or ""."""

    rule: str
    status: str


def gate_of(rule: Rule) -> NamedGate:
    """Return a rule's gate."""
    name, _, status = (rule.gate if isinstance(rule.gate, str) else "").partition(":")
    return NamedGate(name, status)


def gate_state(values: Sequence[float | None], verdicts: Sequence[Verdict], chain: Sequence[Gate]) -> str:
    """Return "shut" if any gate has a low value or another status, "unknown" if any has no value, else "open"."""
    statuses = [verdicts[position].status == status for position, status in chain if status]
    gates = [values[position] for position, status in chain if not status]
    if not all(statuses) or any(value is not None and value < GATE_OPENS_AT for value in gates):
        return "shut"
    return "unknown" if None in gates else "open"


def outbid_warning(rules: Sequence[Rule]) -> str:
    """Return a warning if rules of form can add as much as a right answer, else ""."""
    correct = [rule for rule in rules if rule.judges_correctness and rule.weight > 0]
    style = [rule for rule in rules if not rule.judges_correctness and rule.gate is None and rule.weight != 0]
    if not correct or not style:
        return ""
    # A set may have a correctness rule per task; the right answer with the least reward can be outbid first.
    least, most = min(map(span, correct)), sum(map(span, style))
    if most < least:
        return ""
    names = ", ".join(f"'{rule.name}'" for rule in style)
    gate = min(correct, key=span).name
    return (
        f"The rules {names} can add {most:g} without a right answer, which itself is worth {least:g}: the model may "
        f"learn form instead of answers. Lower their weights, or add gate: {gate}."
    )


def span(rule: Rule) -> float:
    """Return the largest difference of the rule's contributions."""
    low, high = rule.clip or ((0.0, 1.0) if rule.scale is not None else (rule.floor, rule.ceiling))
    return abs(rule.weight) * (high - low)


@dataclass(frozen=True, slots=True)
class Part:
    """One rule's line: its verdict, and the amount that it adds to the total.

    Args:
        rule: Name of the rule.
        value: The rule's value before weight and gate, or None.
        status, detail: As in `Verdict`; `gated` if a gate is not open.
        weight: Weight of the rule.
        gated: Whether a gate that is not open takes the rule out of the total.
        contribution: The amount that the rule adds to the total, None if it is left out.
    """

    rule: str
    value: float | None
    status: str
    weight: float
    gated: bool
    contribution: float | None
    detail: str

    @classmethod
    def of(cls, rule: Rule, verdict: Verdict, gate_state: str, contribution: float | None) -> "Part":
        """Make the line; a gate that is not open gives the status `gated`, and the value stays the rule's.

        Args:
            rule: The rule.
            verdict: Its verdict on a row.
            gate_state: "open", "shut" or "unknown".
            contribution: What the verdict adds to the row's reward, None without a value.
        """
        gated = gate_state != "open"
        detail = f"gate '{rule.gate}' is {gate_state}; {verdict.detail}" if gated else verdict.detail
        status = "gated" if gated else verdict.status
        return cls(rule.name, verdict.value, status, rule.weight, gated, contribution, detail)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One completion's total and its parts. `print(rules.explain(...))` gives:

    rule    value  status  weight  gated  adds    detail
    answer  1.000  ok      1       no     +1.000  'A:': 18; gold whole text: 18
    length  0.500  ok      0.1     no     +0.050  530 tokens
    total   1.050

    Args:
        parts: A line for each rule, in the order of the set.
        total: The completion's reward, None if it has none.
        clip: Lowest and highest total of the set, None without a clip.
    """

    parts: tuple[Part, ...]
    total: float | None
    clip: tuple[float, float] | None = None

    def __str__(self) -> str:
        clip = f"clip {self.clip[0]:g}..{self.clip[1]:g}" if self.clip else ""
        lines = [_HEADINGS, *map(_cells, self.parts), ("total", _number(self.total, ""), clip)]
        widths = []
        for column in range(len(_HEADINGS) - 1):
            widths.append(max(len(line[column]) for line in lines if len(line) > column))
        widths[2] = max(len(line[2]) for line in lines[:-1])  # The note on the clip may cover the next columns.
        padded = []
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=False)]
            padded.append("  ".join(cells).rstrip())
        return "\n".join(padded)


def _cells(part: Part) -> tuple[str, ...]:
    adds = _number(part.contribution, "+")
    gated, detail = "yes" if part.gated else "no", " ".join(part.detail.split())
    return part.rule, _number(part.value, ""), part.status, f"{part.weight:g}", gated, adds, detail


def _number(value: float | None, sign: str) -> str:
    return "none" if value is None else f"{value:{sign}.3f}"


def shortened(text: str, width: int = 160) -> str:
    """Return the text on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."

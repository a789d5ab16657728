"""From verdicts to a total: the arithmetic of a RuleSet, without its machinery.

total = clip(sum of weight * schedule * value over the rules whose gate is open)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_ext.rewards.rule import Rule, Verdict
from trl_ext.rewards.shaping import factor_at, scaled
from trl_ext.rewards.totals.gates import gate_state


@dataclass(frozen=True, slots=True)
class Composed:
    """One row's verdicts, put together.

    Args:
        values: Per rule, scaled and clipped; None where it has none.
        states: Per rule, of its gate: "open", "shut" or "unknown".
        contributions: Per rule, what it adds to the total; None where it is left out.
        total: None where no rule has a value.
    """

    values: tuple[float | None, ...]
    states: tuple[str, ...]
    contributions: tuple[float | None, ...]
    total: float | None


class Composition:
    """The rules' weights, gates and bounds at one moment of the training.

    Args:
        rules, chains: And for each rule the positions of its gates.
        clip: Lowest and highest total.
        progress: Of the training, 0 to 1.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        chains: Sequence[tuple[int, ...]],
        clip: tuple[float, float] | None,
        progress: float,
    ):
        self.rules = rules
        self.chains = chains
        self.clip = clip
        self.weights = [rule.weight * factor_at(rule.schedule, progress) for rule in rules]
        self._shaped = [rule.scale is not None or rule.clip is not None for rule in rules]

    def of(self, verdicts: Sequence[Verdict]) -> Composed:
        """The verdicts of one row, one per rule, put together."""
        values = tuple(self._value(position, verdict) for position, verdict in enumerate(verdicts))
        states = tuple(gate_state(values, chain) if chain else "open" for chain in self.chains)
        contributions = tuple(map(contribution, self.weights, values, states))
        return Composed(values, states, contributions, self._total(contributions))

    def _value(self, position: int, verdict: Verdict) -> float | None:
        if verdict.value is None or not self._shaped[position]:
            return verdict.value
        rule = self.rules[position]
        return scaled(verdict.value, rule.scale, rule.clip)

    def _total(self, contributions: Sequence[float | None]) -> float | None:
        known = [part for part in contributions if part is not None]
        if not known:
            return None
        total = sum(known, 0.0)
        return total if self.clip is None else min(max(total, self.clip[0]), self.clip[1])


def contribution(weight: float, value: float | None, state: str) -> float | None:
    """What a value adds to the total behind a gate in this state."""
    if value is None or state == "unknown":
        return None
    return 0.0 if state == "shut" else weight * value

"""Gates: a rule that counts only where another one is fully met.

An ungated format or length reward is what a model learns in groups that it cannot solve, because there nothing else
varies. A gate removes it where the answer is wrong.
"""

from collections.abc import Sequence

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Rule

GATE_OPENS_AT = 1.0  # A gate's value from which on the gated rule counts: the top of every shipped rule.


def gate_chains(rules: Sequence[Rule]) -> tuple[tuple[int, ...], ...]:
    """For each rule the positions of its gate, its gate's gate and so on; RuleError for unknown gates and circles."""
    positions = {rule.name: position for position, rule in enumerate(rules)}
    return tuple(_chain(rule, rules, positions) for rule in rules)


def _chain(rule: Rule, rules: Sequence[Rule], positions: dict[str, int]) -> tuple[int, ...]:
    chain: list[int] = []
    gate = rule.gate
    while gate is not None:
        if gate not in positions:
            raise RuleError(f"Rule '{rule.name}' has the gate '{gate}'. Give one of {', '.join(positions)}.")
        if positions[gate] in chain or gate == rule.name:
            raise RuleError(f"The gate of rule '{rule.name}' leads in a circle at '{gate}'. Take one gate out.")
        chain.append(positions[gate])
        gate = rules[positions[gate]].gate
    return tuple(chain)


def gate_state(values: Sequence[float | None], chain: Sequence[int]) -> str:
    """ "open", "shut" where a gate's value is too low, or "unknown" where a gate has no value."""
    gates = [values[position] for position in chain]
    if any(value is not None and value < GATE_OPENS_AT for value in gates):
        return "shut"
    return "unknown" if None in gates else "open"

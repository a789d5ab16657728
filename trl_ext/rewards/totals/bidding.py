"""Can style outbid correctness? A model takes the reward that is easiest to get.

If what the ungated rules of form can add is as much as a right answer, a wrong answer in perfect form earns as much as
a right one in bad form.
"""

from collections.abc import Sequence

from trl_ext.rewards.rule import Rule


def outbid_warning(rules: Sequence[Rule]) -> str:
    """The sentence for a set in which rules of form can add as much as a right answer; empty if they cannot."""
    correct = [rule for rule in rules if rule.judges_correctness and rule.weight > 0]
    style = [rule for rule in rules if not rule.judges_correctness and rule.gate is None and rule.weight != 0]
    if not correct or not style:
        return ""
    # Rules for the rows of different tasks stand beside each other; the weakest right answer is what can be outbid.
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
    """What the rule's contribution can vary by, at the largest weight of its schedule."""
    low, high = rule.clip or ((0.0, 1.0) if rule.scale is not None else (rule.floor, rule.ceiling))
    factor = max((abs(point[1]) for point in rule.schedule), default=0.0) if rule.schedule else 1.0
    return abs(rule.weight) * factor * (high - low)

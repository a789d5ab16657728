"""Test a rule on examples: completions that must be paid, and completions that must not."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl_ext.rewards.base.rule import Rule
from trl_ext.rewards.ruleset import RuleSet


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

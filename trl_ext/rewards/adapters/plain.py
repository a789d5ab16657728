"""What trainers outside take: plain numbers for every completion, of sets that keep no state of a training."""

from typing import Any

from trl_ext.errors import RuleError
from trl_ext.rewards.scorer import warn_once
from trl_ext.rewards.totals.explanation import Explanation

UNSCORED = 0.0


def check_stateless(rules: Any, trainer: str) -> None:
    """Raise RuleError for a RuleSet that needs to know how far the training is; other trainers do not say."""
    scheduled = next((rule.name for rule in rules.rules if rule.schedule is not None), None)
    if scheduled is not None:
        raise RuleError(f"Rule '{scheduled}' has a schedule, and {trainer} reports no progress. Take it out.")
    if rules.normalise:
        raise RuleError(f"normalise=True needs the totals of a whole run, and {trainer} has its own. Set it to False.")


def numbered(found: Explanation, trainer: str) -> dict[str, Any]:
    """A completion's total, each rule's value and 1.0 under `unscored` where there is no total, all of them floats.

    A value that a rule does not have is UNSCORED, as a total without any value is: the trainer takes numbers only.
    The first one is said once.
    """
    if found.total is None:
        reasons = ", ".join(f"{part.rule}: {part.status}" for part in found.parts)
        warn_once(
            ("no total", trainer),
            f"A completion has no total ({reasons}), and {trainer} cannot leave it out: it counts as {UNSCORED}. The "
            "share of such completions is logged as 'unscored'; `trl-ext score audit` names the rows of the data.",
        )
    values = {f"rules/{part.rule}": UNSCORED if part.value is None else part.value for part in found.parts}
    is_unscored = found.total is None
    return {"total": UNSCORED if is_unscored else found.total, "unscored": float(is_unscored), **values}

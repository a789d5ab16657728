"""What one entry of a trainer's log history says: the only place that knows the metric keys.

Keys, of which any may be absent:
    reward, rewards/<rule>/mean                    training, per logging interval (TRL's keys)
    eval_reward, eval_rewards/<rule>/mean          evaluation (TRL's keys)
    packing/forwarded_tokens, packing/padded_tokens, packing/forwarded_over_raw    mean per optimizer step
    phase/<name>_s                                 seconds per optimizer step, mean over the logging interval
    train_runtime                                  seconds, in the last entry
"""

import math
import re
from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]

HELD_OUT = "eval_"  # prefix that Trainer.evaluate gives its metrics
EVALUATE = "evaluate"  # the phase that is no part of a step, though its seconds are logged with the next one
_WHOLE_SET = "rules"  # what a RuleSet without a name is called in TRL's metrics


def number(entry: Entry, key: str) -> float | None:
    """The finite value under `key`, else None. TRL logs NaN for a rule that gave no verdict."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def reward(entry: Entry, prefix: str = "") -> float | None:
    """Mean total reward, of training or, with `prefix=HELD_OUT`, of evaluation."""
    return number(entry, f"{prefix}reward")


def rules(entry: Entry, prefix: str = "") -> dict[str, float]:
    """Mean reward per rule, in the order of the log."""
    found = _matches(entry, rf"{prefix}rewards/(.+)/mean")
    total = reward(entry, prefix)
    # A RuleSet is one reward function for TRL, which logs its mean beside the rules' own: it repeats the total.
    if total is not None and math.isclose(found.get(_WHOLE_SET, math.inf), total, rel_tol=1e-3, abs_tol=1e-6):
        del found[_WHOLE_SET]
    return found


def phases(entry: Entry) -> dict[str, float]:
    """Seconds per optimizer step and phase."""
    return _matches(entry, r"phase/(.+)_s")


def step_s(entry: Entry) -> float | None:
    """Seconds of an optimizer step, evaluation left out."""
    seconds = [s for name, s in phases(entry).items() if name != EVALUATE]
    return sum(seconds) if seconds else None


def is_training(entry: Entry) -> bool:
    return "reward" in entry or bool(rules(entry))


def is_held_out(entry: Entry) -> bool:
    return f"{HELD_OUT}reward" in entry or bool(rules(entry, HELD_OUT))


def _matches(entry: Entry, pattern: str) -> dict[str, float]:
    found = {}
    for key in entry:
        match, value = re.fullmatch(pattern, key), number(entry, key)
        if match and value is not None:
            found[match[1]] = value
    return found

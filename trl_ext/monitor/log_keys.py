"""Reading an entry of a trainer's log history: the only place that knows the metric keys.

A kind of run is a table of its curves. Keys beside them, of which any may be absent:
    packing/forwarded_tokens, packing/padded_tokens, packing/skipped_tokens, packing/forwarded_over_raw    mean per
                                                   optimizer step
    packing/is_on                                  1 where rows are packed, 0 where they are padded
    packing/why_off                                text: why they are padded though packing was not turned off
    packing/kernels                                text: whose kernels compute
    phase/<name>_s                                 seconds per optimizer step, mean over the logging interval
    memory/<phase>_gib, memory/predicted_<phase>_gib    highest peak over the logging interval and ranks; the plan's
    train_runtime                                  seconds, in the last entry
    ended_by_error                                 text, in the last entry of a run that failed
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]

HELD_OUT = "eval_"  # prefix that Trainer.evaluate gives its metrics
HELD_OUT_GREEDY = "eval_greedy_"  # of PPO's metrics of greedy completions, in the same entry
WHY_PADDED, KERNELS = "packing/why_off", "packing/kernels"
ERROR = "ended_by_error"
EVALUATE = "evaluate"  # the phase that is no part of a step, though its seconds are logged with the next one


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the steps of a run, or with `*` a family of them.

    Args:
        key: TRL's key in training; evaluation logs the same after HELD_OUT. `*` stands for any name.
        name: What a person reads; `*` is what it stands for in the key.
        axis: The axis that it is drawn on; curves on the same axis share a panel. None: in the tables only.
    """

    key: str
    name: str
    axis: str | None = None

    def values(self, entry: Entry, prefix: str = "") -> dict["Curve", float]:
        """The finite values that the entry has for this curve, one for each member of a family."""
        before, star, after = self.key.partition("*")
        if not star:
            value = number(entry, prefix + self.key)
            return {} if value is None else {self: value}
        found = family(entry, prefix + before, after).items()
        return {Curve(before + name + after, self.name.replace("*", name), self.axis): value for name, value in found}

    def member(self, key: str, prefix: str = "") -> str | None:
        """What `*` stands for in the key, empty for a curve that is no family; None if the key is another one's."""
        before, star, after = (prefix + self.key).partition("*")
        if not star:
            return "" if key == before else None
        is_member = key.startswith(before) and key.endswith(after) and len(key) > len(before) + len(after)
        return key[len(before) : len(key) - len(after)] if is_member else None

    def is_in(self, entry: Entry, prefix: str = "") -> bool:
        """True if the entry has this curve or a member of this family, of whatever value."""
        before, star, after = (prefix + self.key).partition("*")
        if not star:
            return before in entry
        return any(key.startswith(before) and key.endswith(after) for key in entry)


@dataclass(frozen=True, slots=True)
class RunKind:
    """The curves and headings that describe runs of a trainer.

    Args:
        curves: The first one says what the run is about.
        title: Heading of the curves in the report.
        held_out_title: Heading of the evaluations.
        marks: Keys whose entries belong to this kind; unset, those of the curves on the first axis.
    """

    curves: tuple[Curve, ...]
    title: str
    held_out_title: str
    marks: tuple[str, ...] = ()

    @property
    def axes(self) -> list[str]:
        """The panels of the plot, from top to bottom."""
        return list(dict.fromkeys(curve.axis for curve in self.curves if curve.axis))

    def is_logged_in(self, entry: Entry, prefix: str = "") -> bool:
        """True also where the value is NaN."""
        if not self.marks:
            return self.is_scored_in(entry, prefix)
        return any(prefix + mark in entry for mark in self.marks)

    def is_scored_in(self, entry: Entry, prefix: str = "") -> bool:
        """True if the entry has a curve on the first axis; a step on completions of an earlier one has none."""
        first_axis = [curve for curve in self.curves if curve.axis == self.curves[0].axis]
        return any(curve.is_in(entry, prefix) for curve in first_axis)

    def in_order(self, curves: Iterable[Curve]) -> list[Curve]:
        """Different curves in the order of this kind's table, members of a family as they come."""

        def place(curve: Curve) -> int:
            return next(place for place, entry in enumerate(self.curves) if entry.member(curve.key) is not None)

        return sorted(dict.fromkeys(curves), key=place)


GRPO = RunKind(
    curves=(Curve("reward", "reward", "mean reward"), Curve("rewards/*/mean", "*", "mean reward")),
    title="Rewards",
    held_out_title="Held-out problems",
)
PPO = RunKind(
    curves=(
        Curve("objective/scores", "score", "mean score"),
        Curve("rewards/*/mean", "*", "mean score"),
        Curve("objective/kl", "KL", "KL"),
        Curve("loss/value_avg", "value loss", "value loss"),
        Curve("ppo/explained_variance", "explained variance", "explained variance"),
        Curve("ppo/kl_coef", "KL coefficient"),
    ),
    title="Scores",
    held_out_title="Held-out prompts",
    # An optimizer step on completions of an earlier one logs its losses alone.
    marks=("ppo/unscored_frac", "loss/value_avg"),
)
REWARD_MODEL = RunKind(
    curves=(
        Curve("accuracy", "accuracy", "accuracy"),
        Curve("accuracy_rules_agree", "if rules agree", "accuracy"),
        Curve("accuracy_rules_disagree", "if rules disagree", "accuracy"),
        Curve("margin", "margin", "margin"),
        Curve("loss", "loss", "loss"),
        Curve("mean_reward", "mean score"),
        Curve("rules_agree_frac", "share where rules agree"),
        Curve("score_length_correlation", "score-length correlation"),
    ),
    title="Reward model",
    held_out_title="Held-out pairs",
)
# PPO first: its runs log what GRPO's do as well.
KINDS = (PPO, GRPO, REWARD_MODEL)

# What a RuleSet without a name is called in TRL's metrics.
WHOLE_SET = "rewards/rules/mean"


def kind_of(log_history: Iterable[Entry]) -> RunKind:
    """The kind of run that wrote the history; GRPO where nothing tells."""
    kinds = (kind for entry in log_history for prefix in ("", HELD_OUT) if (kind := _kind(entry, prefix)))
    return next(kinds, GRPO)


def number(entry: Entry, key: str) -> float | None:
    """The finite value under `key`, else None. TRL logs NaN for a rule that gave no verdict."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def values(entry: Entry, prefix: str = "") -> dict[Curve, float]:
    """The entry's curves in the order of their table, of training or, with `prefix=HELD_OUT`, of evaluation."""
    kind = _kind(entry, prefix)
    found = {c: value for curve in (kind.curves if kind else ()) for c, value in curve.values(entry, prefix).items()}
    # A RuleSet is one reward function for TRL, which logs its mean beside the rules' own: it repeats the total.
    whole, total = number(entry, prefix + WHOLE_SET), number(entry, f"{prefix}reward")
    if whole is not None and total is not None and math.isclose(whole, total, rel_tol=1e-3, abs_tol=1e-6):
        found = {curve: value for curve, value in found.items() if curve.key != WHOLE_SET}
    return found


def phases(entry: Entry) -> dict[str, float]:
    """Seconds per optimizer step and phase."""
    return family(entry, "phase/", "_s")


def step_s(entry: Entry) -> float | None:
    """Seconds of an optimizer step, evaluation left out."""
    seconds = [s for name, s in phases(entry).items() if name != EVALUATE]
    return sum(seconds) if seconds else None


def memory(entry: Entry) -> dict[str, float]:
    """GiB allocated at the peak of every phase."""
    found = family(entry, "memory/", "_gib")
    return {name: peak for name, peak in found.items() if name != "reserved" and not name.startswith("predicted_")}


def family(entry: Entry, before: str, after: str) -> dict[str, float]:
    """The finite values of the keys with these two ends, by what stands between them."""
    keys = [key for key in entry if key.startswith(before) and key.endswith(after)]
    names = {key: key[len(before) : len(key) - len(after)] for key in keys}
    return {name: value for key, name in names.items() if name and (value := number(entry, key)) is not None}


def is_training(entry: Entry) -> bool:
    return _kind(entry, "") is not None


def is_held_out(entry: Entry) -> bool:
    return _kind(entry, HELD_OUT) is not None


def _kind(entry: Entry, prefix: str) -> RunKind | None:
    return next((kind for kind in KINDS if kind.is_logged_in(entry, prefix)), None)

"""Metric keys: reads entries of a trainer's log history.

A kind of run is a table of its curves. Other keys, any of which may be absent:
    packing/forwarded_tokens, packing/padded_tokens, packing/skipped_tokens, packing/forwarded_over_raw    mean per
                                                   optimizer step
    packing/is_on                                  1 where rows are packed, 0 where they are padded
    packing/why_off                                text: why rows are padded though packing was not turned off
    packing/kernels                                text: the source of the kernels
    packing/faster                                 text: packages and settings that would shorten updates on this card
    phase/<name>_s                                 seconds per optimizer step, mean over the logging interval
    memory/<phase>_gib, memory/predicted_<phase>_gib    highest peak over the logging interval and ranks; the plan's
    train_runtime                                  seconds, in the last entry
    ended_by_error                                 text, in the last entry of a run that failed
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Entry = Mapping[str, Any]

HELD_OUT = "eval_"  # prefix that Trainer.evaluate gives its metrics
WHY_PADDED, KERNELS, FASTER = "packing/why_off", "packing/kernels", "packing/faster"
ERROR = "ended_by_error"
EVALUATE = "evaluate"  # This phase is not part of a step, though its seconds are logged with the next step.


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the steps of a run, or with `*` a family of metrics.

    Args:
        key: TRL's key in training; evaluation puts HELD_OUT before it. `*` matches any name.
        name: Its name for people; `*` is replaced by the matched name.
        axis: The axis of its chart; curves on the same axis share a panel. None: only in tables.
    """

    key: str
    name: str
    axis: str | None = None

    def values(self, entry: Entry, prefix: str = "") -> dict["Curve", float]:
        """Return the entry's finite values of this curve, one for each member of a family."""
        found = {curve: number(entry, key) for key, curve in self.members(entry, prefix)}
        return {curve: value for curve, value in found.items() if value is not None}

    def members(self, keys: Iterable[str], prefix: str = "") -> Iterator[tuple[str, "Curve"]]:
        """Yield the keys that this curve matches, each with its curve: the same, or a member of the family."""
        for key in keys:
            if (name := self.member(key, prefix)) is not None:
                yield key, Curve(key.removeprefix(prefix), self.name.replace("*", name), self.axis)

    def member(self, key: str, prefix: str = "") -> str | None:
        """Return the name that `*` matches in the key, "" for a curve without `*`; None if the key does not match."""
        before, star, after = (prefix + self.key).partition("*")
        if not star:
            return "" if key == before else None
        is_member = key.startswith(before) and key.endswith(after) and len(key) > len(before) + len(after)
        return key[len(before) : len(key) - len(after)] if is_member else None


@dataclass(frozen=True, slots=True)
class RunKind:
    """The curves and headings that describe runs of a trainer.

    Args:
        curves: The first is the run's main metric.
        title: Heading of the curves in the report.
        held_out_title: Heading of the evaluations.
        marks: Keys that identify entries of this kind; empty for the keys of the curves on the first axis.
    """

    curves: tuple[Curve, ...]
    title: str
    held_out_title: str
    marks: tuple[str, ...] = ()

    @property
    def axes(self) -> list[str]:
        """Panels of the plot, from top to bottom."""
        return list(dict.fromkeys(curve.axis for curve in self.curves if curve.axis))

    def is_scored_in(self, entry: Entry, prefix: str = "") -> bool:
        """Return True if the entry has a curve on the first axis; a step that reuses completions has none."""
        first_axis = [curve for curve in self.curves if curve.axis == self.curves[0].axis]
        return any(curve.member(key, prefix) is not None for curve in first_axis for key in entry)

    def in_order(self, curves: Iterable[Curve]) -> list[Curve]:
        """Return the curves without repeats in the order of this kind's table, members of a family in their order."""

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
    # An optimizer step that reuses completions logs only its losses.
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
# PPO first: its runs also log GRPO's keys.
KINDS = (PPO, GRPO, REWARD_MODEL)

# TRL's key for a RuleSet without a name.
WHOLE_SET = "rewards/rules/mean"


def kind_of(log_history: Iterable[Entry]) -> RunKind:
    """Return the kind of run that wrote the history; GRPO if no entry shows it."""
    kinds = (kind for entry in log_history for prefix in ("", HELD_OUT) if (kind := kind_of_entry(entry, prefix)))
    return next(kinds, GRPO)


def number(entry: Entry, key: str) -> float | None:
    """Return the finite value of `key`, else None. TRL logs NaN for a rule that gave no verdict."""
    return finite(entry.get(key))


def finite(value: Any) -> float | None:
    """Return a finite number as a float, anything else as None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def values(entry: Entry, prefix: str = "") -> dict[Curve, float]:
    """Return the entry's curves of training, or of evaluation with `prefix=HELD_OUT`, in the order of their table."""
    kind = kind_of_entry(entry, prefix)
    found = {c: value for curve in (kind.curves if kind else ()) for c, value in curve.values(entry, prefix).items()}
    # TRL logs the mean of a RuleSet, one reward function, as well as the means of its rules: it repeats the total.
    whole, total = number(entry, prefix + WHOLE_SET), number(entry, f"{prefix}reward")
    if whole is not None and total is not None and math.isclose(whole, total, rel_tol=1e-3, abs_tol=1e-6):
        found = {curve: value for curve, value in found.items() if curve.key != WHOLE_SET}
    return found


def phases(entry: Entry) -> dict[str, float]:
    """Return the seconds per optimizer step by phase."""
    return family(entry, "phase/", "_s")


def step_s(entry: Entry) -> float | None:
    """Return the seconds of an optimizer step, without evaluation."""
    seconds = [s for name, s in phases(entry).items() if name != EVALUATE]
    return sum(seconds) if seconds else None


def memory(entry: Entry) -> dict[str, float]:
    """Return the GiB allocated at the peak of every phase."""
    found = family(entry, "memory/", "_gib")
    return {name: peak for name, peak in found.items() if name != "reserved" and not name.startswith("predicted_")}


def family(entry: Entry, before: str, after: str) -> dict[str, float]:
    """Return the finite values of the keys with these two ends, by the part between them."""
    keys = [key for key in entry if key.startswith(before) and key.endswith(after)]
    names = {key: key[len(before) : len(key) - len(after)] for key in keys}
    return {name: value for key, name in names.items() if name and (value := number(entry, key)) is not None}


def kind_of_entry(entry: Entry, prefix: str = "") -> RunKind | None:
    """Return the kind to which an entry of training, or of evaluation with `prefix=HELD_OUT`, belongs.

    A value may be NaN. None for an entry of neither.
    """
    for kind in KINDS:
        if any(prefix + mark in entry for mark in kind.marks) or (not kind.marks and kind.is_scored_in(entry, prefix)):
            return kind
    return None


# Series -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Steps and values of one key, in the order of the log."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_series(log_history: Iterable[Entry]) -> dict[str, Series]:
    """Return the series of every key with a finite value, in the order in which keys first appear."""
    found: dict[str, Series] = {}
    for entry in log_history:
        step = entry.get("step", 0)
        for key, value in entry.items():
            if type(value) in (float, int) and math.isfinite(value) and key not in ("step", "epoch"):
                series = found.get(key)
                if series is None:
                    series = found[key] = Series()
                series.steps.append(int(step))
                series.values.append(float(value))
    for prefix in ("", HELD_OUT):  # For TRL a RuleSet is one reward function, so its mean repeats the total.
        whole, total = (found.get(prefix + key) for key in (WHOLE_SET, "reward"))
        if whole and total and whole.steps == total.steps:
            pairs = zip(whole.values, total.values, strict=True)
            if all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-6) for pair in pairs):
                del found[prefix + WHOLE_SET]
    return found

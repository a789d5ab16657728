"""Series of a run's log, by key, and the panels that they are drawn in.

Legend: a series is one key's finite values over optimizer steps.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Curve, Entry, RunKind


@dataclass(frozen=True, slots=True)
class Series:
    """One key of the log: steps and the values there, in the order of the log."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def is_same(self, other: "Series") -> bool:
        """True if the values are equal but for rounding, at the same steps."""
        near = lambda pair: math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-6)  # noqa: E731
        return self.steps == other.steps and all(map(near, zip(self.values, other.values, strict=True)))


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that are drawn on one pair of axes.

    Args:
        title: What they show.
        unit: Of the values; empty for a number without unit.
        curves: Keys and names; families (`*`) are drawn one line a member.
        only_positive: Leave out members that are 0 throughout.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    only_positive: bool = False


def _panel(title: str, unit: str, key: str, *others: Curve) -> Panel:
    return Panel(title, unit, (Curve(key, title[0].lower() + title[1:]), *others))


# Of all kinds of runs, in this order. A panel whose keys a log lacks is not drawn.
PANELS = (
    Panel("KL to the reference model", "nats per token", (Curve("kl", "KL"),)),
    _panel("Entropy", "nats per token", "entropy"),
    Panel(
        "Completion length",
        "tokens",
        (
            Curve("completions/mean_length", "mean"),
            Curve("completions/max_length", "longest"),
            Curve("completions/min_length", "shortest"),
        ),
    ),
    _panel("Truncated completions", "share", "completions/clipped_ratio"),
    _panel("Groups in which all earn the same", "share", "frac_reward_zero_std"),
    _panel("Standard deviation of rewards", "", "reward_std"),
    _panel("Gradient norm", "", "grad_norm", Curve("ppo/value_grad_norm", "critic's own")),
    _panel("Learning rate", "", "learning_rate"),
    _panel("Loss", "", "loss"),
    Panel("Clipped probability ratios", "share", (Curve("clip_ratio/region_mean", "clipped"),)),
    Panel("Policy loss", "", (Curve("loss/policy_avg", "policy loss"),)),
    _panel("KL in the loss", "nats per token", "loss/kl_avg"),
    _panel("KL coefficient", "", "ppo/kl_coef"),
    _panel("Clipped values", "share", "val/clipfrac_avg"),
    _panel("Completions without a score", "share", "ppo/unscored_frac"),
    Panel(
        "Values and returns",
        "mean per token",
        (Curve("ppo/value_mean", "value"), Curve("ppo/return_mean", "return")),
    ),
    Panel(
        "Scale of the critic",
        "",
        (Curve("ppo/value_scale_mean", "mean"), Curve("ppo/value_scale_std", "standard deviation")),
    ),
    Panel(
        "Score of answers",
        "",
        (Curve("mean_reward", "mean"), Curve("max_reward", "highest"), Curve("min_reward", "lowest")),
    ),
    _panel("Correlation of score and length", "", "score_length_correlation"),
    _panel("Share where rules agree", "share", "rules_agree_frac"),
    Panel(
        "Log-probabilities of vLLM and of the trainer, difference",
        "nats per token",
        (Curve("sampling/sampling_logp_difference/mean", "mean"),),
    ),
    Panel(
        "Rules that gave no value",
        "share of completions",
        tuple(
            Curve(f"rules/*/{key}", f"*: {name}")
            for key, name in [("none_frac", "no value"), ("timeout_frac", "out of time"), ("error_frac", "failed")]
        ),
        only_positive=True,
    ),
    Panel(
        "Tokens of a step",
        "",
        (
            Curve("packing/forwarded_tokens", "forwarded"),
            Curve("packing/padded_tokens", "as padded batches"),
            Curve("packing/skipped_tokens", "left out, without advantage"),
        ),
        only_positive=True,
    ),
    Panel("Memory at the peak", "GiB", (Curve("memory/*_gib", "*"),)),
)


def read_series(log_history: Iterable[Entry]) -> dict[str, Series]:
    """Every key with a finite value, in the order in which they first appear."""
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
    for prefix in ("", HELD_OUT):  # a RuleSet is one reward function for TRL, and repeats the total
        whole, total = (found.get(prefix + key) for key in (log_keys.WHOLE_SET, "reward"))
        if whole and total and whole.is_same(total):
            del found[prefix + log_keys.WHOLE_SET]
    return found


def main_panels(kind: RunKind) -> list[Panel]:
    """The panels of what the run is about, one for each axis of its kind."""
    panels = []
    for axis in kind.axes:
        curves = tuple(curve for curve in kind.curves if curve.axis == axis)
        panels.append(Panel(axis[0].upper() + axis[1:], "", curves))
    return panels


def other_panels(kind: RunKind) -> list[Panel]:
    """The other panels, without the curves that the main ones have."""
    drawn = {curve.key for curve in kind.curves if curve.axis}
    kept = ((panel, tuple(curve for curve in panel.curves if curve.key not in drawn)) for panel in PANELS)
    return [Panel(panel.title, panel.unit, curves, panel.only_positive) for panel, curves in kept if curves]


def members(panel: Panel, series: Mapping[str, Series], prefix: str = "") -> Iterator[tuple[Curve, Series]]:
    """The panel's curves that the log has, with their series."""
    for curve in panel.curves:
        keys: Sequence[str] = [prefix + curve.key] if "*" not in curve.key else list(series)
        for key in keys:
            member = curve.member(key, prefix)
            if member is None or key not in series or (key.startswith("memory/") and not log_keys.memory({key: 0.0})):
                continue
            if panel.only_positive and max(series[key].values) <= 0:
                continue
            yield Curve(key.removeprefix(prefix), curve.name.replace("*", member), curve.axis), series[key]

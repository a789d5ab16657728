"""Series of a run's log (a key's finite values over optimizer steps), and their panels."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Curve, Entry, RunKind


@dataclass(frozen=True, slots=True)
class Series:
    """Steps and values of one key, in the order of the log."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves on one pair of axes.

    Args:
        unit: Unit of the values, or empty.
        curves: Keys and names; a family (`*`) has a line for each member.
        only_positive: Leave out members that are 0 throughout.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    only_positive: bool = False


def _panel(title: str, unit: str, keys: str | dict[str, str], *, only_positive: bool = False) -> Panel:
    """Make a panel of keys with their names, or of a single key named like the panel."""
    names = {keys: title[0].lower() + title[1:]} if isinstance(keys, str) else keys
    return Panel(title, unit, tuple(Curve(key, name) for key, name in names.items()), only_positive)


_LENGTHS = {"mean": "mean", "max": "longest", "min": "shortest"}
_NO_VALUE = {"none_frac": "no value", "timeout_frac": "out of time", "error_frac": "failed"}
_TOKENS = {"forwarded": "forwarded", "padded": "as padded batches", "skipped": "left out, without advantage"}
# For all kinds of runs, in this order. A panel without logged keys is not drawn.
PANELS = (
    _panel("KL to the reference model", "nats per token", {"kl": "KL"}),
    _panel("Entropy", "nats per token", "entropy"),
    _panel("Completion length", "tokens", {f"completions/{key}_length": name for key, name in _LENGTHS.items()}),
    _panel("Truncated completions", "share", "completions/clipped_ratio"),
    _panel("Groups in which all earn the same", "share", "frac_reward_zero_std"),
    _panel("Standard deviation of rewards", "", "reward_std"),
    _panel("Gradient norm", "", {"grad_norm": "gradient norm", "ppo/value_grad_norm": "critic's own"}),
    _panel("Learning rate", "", "learning_rate"),
    _panel("Loss", "", "loss"),
    _panel("Clipped probability ratios", "share", {"clip_ratio/region_mean": "clipped"}),
    _panel("Policy loss", "", "loss/policy_avg"),
    _panel("KL in the loss", "nats per token", "loss/kl_avg"),
    _panel("KL coefficient", "", "ppo/kl_coef"),
    _panel("Clipped values", "share", "val/clipfrac_avg"),
    _panel("Completions without a score", "share", "ppo/unscored_frac"),
    _panel("Values and returns", "mean per token", {"ppo/value_mean": "value", "ppo/return_mean": "return"}),
    _panel("Scale of the critic", "", {"ppo/value_scale_mean": "mean", "ppo/value_scale_std": "standard deviation"}),
    _panel("Score of answers", "", {"mean_reward": "mean", "max_reward": "highest", "min_reward": "lowest"}),
    _panel("Correlation of score and length", "", "score_length_correlation"),
    _panel("Share where rules agree", "share", "rules_agree_frac"),
    _panel(
        "Log-probabilities of vLLM and of the trainer, difference",
        "nats per token",
        {"sampling/sampling_logp_difference/mean": "mean"},
    ),
    _panel(
        "Rules that gave no value",
        "share of completions",
        {f"rules/*/{key}": f"*: {name}" for key, name in _NO_VALUE.items()},
        only_positive=True,
    ),
    _panel(
        "Tokens of a step",
        "",
        {f"packing/{key}_tokens": name for key, name in _TOKENS.items()},
        only_positive=True,
    ),
    _panel("Memory at the peak", "GiB", {"memory/*_gib": "*"}),
)


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
        whole, total = (found.get(prefix + key) for key in (log_keys.WHOLE_SET, "reward"))
        if whole and total and whole.steps == total.steps:
            pairs = zip(whole.values, total.values, strict=True)
            if all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-6) for pair in pairs):
                del found[prefix + log_keys.WHOLE_SET]
    return found


def main_panels(kind: RunKind) -> list[Panel]:
    """Return a panel for each axis of the run's kind."""
    panels = []
    for axis in kind.axes:
        curves = tuple(curve for curve in kind.curves if curve.axis == axis)
        panels.append(Panel(axis[0].upper() + axis[1:], "", curves))
    return panels


def other_panels(kind: RunKind) -> list[Panel]:
    """Return the other panels, without the curves of the main panels."""
    drawn = {curve.key for curve in kind.curves if curve.axis}
    kept = ((panel, tuple(curve for curve in panel.curves if curve.key not in drawn)) for panel in PANELS)
    return [Panel(panel.title, panel.unit, curves, panel.only_positive) for panel, curves in kept if curves]


def members(panel: Panel, series: Mapping[str, Series], prefix: str = "") -> Iterator[tuple[Curve, Series]]:
    """Yield the panel's curves that the log has, with their series."""
    for curve in panel.curves:
        keys: Sequence[str] = [prefix + curve.key] if "*" not in curve.key else list(series)
        for key in keys:
            member = curve.member(key, prefix)
            if member is None or key not in series or (key.startswith("memory/") and not log_keys.memory({key: 0.0})):
                continue
            if panel.only_positive and max(series[key].values) <= 0:
                continue
            yield Curve(key.removeprefix(prefix), curve.name.replace("*", member), curve.axis), series[key]

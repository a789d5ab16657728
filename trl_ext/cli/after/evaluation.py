"""Completions scored by rules, and their statistics: pass@k with intervals, the mean of every rule, lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, fmean
from typing import Any

from trl_ext.cli.after.engines import Completion
from trl_ext.errors import ConfigError, DataError
from trl_ext.resources import __version__
from trl_ext.rewards import RuleSet
from trl_ext.rewards.base.rows import as_columns

_Z = NormalDist().inv_cdf(0.975)
WILSON = "Wilson, 95 %"
BOOTSTRAP = "bootstrap over problems, 95 %"
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class ShareEstimate:
    """A share of problems between 0 and 1, with the ends of its interval and the method that computed it."""

    value: float
    low: float
    high: float
    num_problems: int
    method: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Statistics of a policy's completions.

    Args:
        settings: Settings of the evaluation, for evaluation.json.
        passes: pass@k by k.
        means: Mean value of each rule over the completions that it scored; None if it scored none.
        unscored: Number of completions without a value, by rule.
        reward: Mean total.
        truncated_frac: Share of completions that the length limit ended.
    """

    settings: Mapping[str, Any]
    passes: Mapping[int, ShareEstimate]
    means: Mapping[str, float | None]
    unscored: Mapping[str, int] = field(default_factory=dict)
    reward: float | None = None
    mean_length_tokens: float = 0.0
    truncated_frac: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], rules: RuleSet, settings: Mapping[str, Any]) -> "Evaluation":
        """Compute statistics of rows of `judged`; raise DataError if the deciding rule scored none of them."""
        counts = _count_passed(rows)
        if not counts:
            raise DataError(
                f"The rule '{settings['pass_rule']}' has no value for any completion, for example because no gold "
                "answer can be read. `trl-ext score audit` names the rows."
            )
        passes = {k: estimate(counts, k) for k in powers_up_to(settings["num_generations"])}
        values = as_columns([row["values"] for row in rows], [rule.name for rule in rules.rules])
        return cls(
            settings=settings,
            passes={k: one for k, one in passes.items() if one is not None},
            means={name: _mean(column) for name, column in values.items()},
            unscored={name: column.count(None) for name, column in values.items()},
            reward=_mean([row["total"] for row in rows]),
            mean_length_tokens=fmean(len(row["completion_ids"]) for row in rows),
            truncated_frac=fmean(row["finish_reason"] == "length" for row in rows),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return {
            "trl_ext": __version__,
            **self.settings,
            "pass@k": {str(k): asdict(one) for k, one in self.passes.items()},
            "rules_mean": dict(self.means),
            "rules_unscored": dict(self.unscored),
            "reward_mean": self.reward,
            "mean_length_tokens": self.mean_length_tokens,
            "truncated_frac": self.truncated_frac,
        }

    def title(self) -> str:
        """Return dataset, sampling and deciding rule in a line."""
        asked = self.settings
        how = "greedy" if asked["temperature"] == 0 else f"{asked['num_generations']} at {asked['temperature']:g}"
        return f"{asked['num_problems']} problems of {asked['dataset']}, {how}, rule '{asked['pass_rule']}'"

    def table(self) -> Any:
        """Return the table for rich to print."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD)
        for name, side in (("", "left"), ("", "right"), ("interval", "right"), ("", "left")):
            table.add_column(name, justify=side)  # type: ignore[arg-type]
        for k, one in self.passes.items():
            table.add_row(f"pass@{k}", f"{one.value:.3f}", f"{one.low:.3f} .. {one.high:.3f}", one.method)
        for name, mean in self.means.items():
            note = f"{self.unscored[name]} completions unscored" if self.unscored[name] else ""
            table.add_row(Text(f"mean {name}"), "-" if mean is None else f"{mean:.3f}", "", note)
        table.add_row("mean reward", "-" if self.reward is None else f"{self.reward:.3f}", "", "")
        table.add_row("tokens", f"{self.mean_length_tokens:.1f}", "", f"{self.truncated_frac:.1%} cut off")
        return table


def _count_passed(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the number of judged completions of each problem, and of those that passed."""
    passed: dict[int, list[bool]] = {}
    for row in rows:
        if row["passed"] is not None:
            passed.setdefault(row["problem"], []).append(row["passed"])
    return [(len(verdicts), sum(verdicts)) for verdicts in passed.values()]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def pass_rule(rules: RuleSet, name: str | None) -> str:
    """Return `name`, else the first rule that judges correctness, else the first; ConfigError for an unknown name."""
    names = [rule.name for rule in rules.rules]
    if name is not None and name not in names:
        raise ConfigError(f"There is no rule '{name}'. Give --pass_rule one of {', '.join(names)}.")
    return name or next((rule.name for rule in rules.rules if rule.judges_correctness), names[0])


def answered(
    problems: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[Completion]], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row for each completion, not judged yet, for completions.jsonl.

    Args:
        problems: Rows with a prompt, and the columns that the rules read.
        answers: The completions of each problem.
        columns: Names of the columns that the rules read.
    """
    rows = []
    for number, (problem, completions) in enumerate(zip(problems, answers, strict=True)):
        prompt, own = problem["prompt"], {name: problem[name] for name in columns}
        for one in completions:
            said = one.text if isinstance(prompt, str) else [{"role": "assistant", "content": one.text}]
            row = {"problem": number, "prompt": prompt, "completion": said, "completion_ids": list(one.token_ids)}
            rows.append(row | {"finish_reason": one.finish_reason} | own)
    return rows


def judged(rules: RuleSet, rows: Sequence[dict[str, Any]], passing: str, threshold: float) -> list[dict[str, Any]]:
    """Score the rows of `answered`; return them with their verdicts, as `trl-ext score explain` reads them.

    Args:
        rules: The rules.
        rows: One for each completion.
        passing: Name of the deciding rule.
        threshold: Least value of that rule with which a completion passes.
    """
    given = as_columns(rows, ("prompt", "completion", "completion_ids"))
    columns: dict[str, Any] = as_columns(rows, rules.columns)
    explained = rules.explain_all(given["prompt"], given["completion"], given["completion_ids"], **columns)
    found = []
    for row, explanation in zip(rows, explained, strict=True):
        values = {part.rule: part.value for part in explanation.parts}
        value = values[passing]
        verdict = {
            "prompt_end": rules.prompt_end,
            "passed": None if value is None else value >= threshold,
            "total": explanation.total,
            "values": values,
        }
        found.append(row | verdict)
    return found


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate, from n >= k samples of a problem, of the chance that one of k samples is right.

    Source: arXiv:2107.03374, equation 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def estimate(counts: Sequence[tuple[int, int]], k: int) -> ShareEstimate | None:
    """Return pass@k over problems; None if no problem has k samples.

    With one sample a problem the interval is Wilson's. With several it is a percentile bootstrap over problems. If all
    problems have equal shares the bootstrap would give a single point, so Wilson's interval, which is too wide for
    shares, is used.

    Args:
        counts: Samples and right samples of each problem.
        k: Number of samples of which at least one must be right.

    Source: Wilson, JASA 22 (1927) 209; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    shares = [pass_at_k(num, right, k) for num, right in counts if num >= k]
    if not shares:
        return None
    value = fmean(shares)
    if max(num for num, _ in counts) == 1 or min(shares) == max(shares):
        return ShareEstimate(value, *wilson(value, len(shares)), len(shares), WILSON)
    import numpy as np

    values, times = np.unique(shares, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(shares), times / len(shares), size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / len(shares), [2.5, 97.5])
    return ShareEstimate(value, float(low), float(high), len(shares), BOOTSTRAP)


def wilson(share: float, num: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval for a share of `num` trials."""
    scale = 1 + _Z**2 / num
    middle = (share + _Z**2 / (2 * num)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)

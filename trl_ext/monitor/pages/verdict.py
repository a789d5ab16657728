"""The verdict on a run: whether it learned, whether it ended, and warnings."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trl_ext.monitor.log_keys import ERROR, EVALUATE, HELD_OUT, PPO, REWARD_MODEL, Curve, Entry, Series
from trl_ext.monitor.summary import Change, RunSummary
from trl_ext.monitor.words import cut, duration, from_to, score, short

# Thresholds of warnings. A warning does not prove a fault.
TRUNCATED_FRAC = 0.1
SAME_REWARD_FRAC = 0.5
KL_PER_TOKEN = 1.0
ENTROPY_LEFT_FRAC = 0.1
NO_VALUE_FRAC = 0.05
MEMORY_OVER_PLAN = 1.05
LENGTH_CORRELATION = 0.5
OVERFIT_GAP = 0.15
OUTBID = 0.05
IDLE_FRAC = 0.3
GENERATION_FRAC = 0.5
MOST_WARNINGS = 8
MOST_CHARS = 500  # of an error in the headline
# A smaller change, as a share of the larger value, does not count.
_SMALL = 0.02
_RULES = Curve("rewards/*/mean", "*")
# What to do after a run that ended badly without another warning.
_WORSE = "Read the samples. Lower learning_rate; if grad_norm is 0, change prompts or reward, or allow more tokens."
_WITHOUT_VALUE = {
    "timeout_frac": "ran out of time or memory on {:.1%} of completions. Raise `limits`, or give it a gate.",
    "error_frac": "failed on {:.1%} of completions. `trl-ext score explain` shows the error.",
    "none_frac": "gave no value on {:.1%} of completions. `trl-ext score audit` shows which rows it cannot judge.",
}


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict.

    Args:
        headline: The change of the run's main metric.
        mood: "better", "worse", "same" or "unknown".
        is_finished: True if it took all its steps.
        warnings: Sentences that end on what to do.
    """

    headline: str
    mood: str
    ending: str
    is_finished: bool
    warnings: tuple[str, ...]


def judge_run(
    log_history: Sequence[Entry],
    series: Mapping[str, Series],
    summary: RunSummary,
    max_steps: int | None,
    measures: Sequence[str] = (),
    faster_generation: str = "",
) -> RunVerdict:
    """Judge a run.

    Args:
        max_steps: Its planned steps, None if not known.
        measures: Keys of evaluation that training does not reward, without prefix.
        faster_generation: A sentence with the setting that shortens generation; may be empty.
    """
    headline, mood = _learning(series, summary)
    norms = [entry for entry in log_history if "grad_norm" in entry]
    # The gradient norm is of the last step only; the share of skipped rows is of all steps of the entry.
    idle = [e for e in norms if e["grad_norm"] == 0 and e.get("packing/skipped_rows_frac", 1) == 1]
    if len(idle) == max(len(norms), 1) or (2 * len(idle) > len(norms) and mood != "better"):
        how_little = "Nothing" if len(idle) == len(norms) else "Hardly anything"
        headline = f"{how_little} was trained: {len(idle):,} of {len(norms):,} logged steps had no gradient"
        mood = "worse"
    numbers = ((key, entry.get(key), entry.get("step", "?")) for entry in log_history for key in ("loss", "grad_norm"))
    broken = next((one for one in numbers if isinstance(one[1], float) and not math.isfinite(one[1])), None)
    failure = broken and (
        "{} was {} in step {}: from there on the weights may be broken. Resume from an earlier checkpoint with a "
        "lower learning_rate, max_grad_norm of 1.0 or less, and bf16 instead of fp16.".format(*broken)
    )
    if error := next((entry for entry in log_history if ERROR in entry), None):
        headline, mood = f"It failed after step {error['step']}: {cut(error[ERROR], MOST_CHARS)}", "worse"
    is_finished, steps = summary.train_s is not None, f"{summary.num_steps:,} steps"
    if max_steps:
        is_finished, steps = summary.num_steps >= max_steps, f"{summary.num_steps:,} of {max_steps:,} steps"
    time, state = "", "stopped or still running"
    if summary.train_s is not None:
        time, state = f" in {duration(summary.train_s)}", "ended early"
    state = "failed" if failure or error else "finished" if is_finished else state
    ending = f"{state}: {steps}{time}"
    warnings = [*filter(None, [failure]), *_overfit(series, summary, measures), *_warnings(series, summary)]
    if not warnings and mood == "worse" and not error:
        warnings = [_WORSE]
    seconds = {name: took for name, took in (summary.phase_s or {}).items() if name != EVALUATE}
    share = seconds.get("generate", 0.0) / max(sum(seconds.values()), 1e-9)
    if faster_generation and share > GENERATION_FRAC:
        warnings.append(f"Generation took {share:.0%} of the time. {faster_generation}")
    if len(warnings) > MOST_WARNINGS:
        warnings[MOST_WARNINGS - 1 :] = [f"And {len(warnings) - MOST_WARNINGS + 1} more of the kind."]
    return RunVerdict(headline, mood, ending[0].upper() + ending[1:], is_finished and not failure, tuple(warnings))


def _learning(series: Mapping[str, Series], summary: RunSummary) -> tuple[str, str]:
    """Return headline and mood from the run's main curve, on held-out rows if it was evaluated before and after."""
    curve = summary.kind.curves[0]
    change = next((found for c, found in summary.held_out.items() if c.key == curve.key), Change())
    where, logged = f"on {summary.kind.held_out_title.lower()}", Series()
    if change.before is None or change.after is None:
        change = next((found for c, found in summary.training.items() if c.key == curve.key), Change())
        where, logged = "in training", series.get(curve.key, Series())
    name = curve.name[0].upper() + curve.name[1:]
    before, after = change.before, change.after
    if before is None or after is None:
        return f"There is no {curve.name} in the log", "unknown"
    if len(logged.values) == 1:
        return f"{name} {score(after)} in the only logged step: too little to judge", "unknown"
    noise = _SMALL * max(abs(before), abs(after))
    if logged.values:
        noise = max(noise, _noise(logged.values, _window(logged)))
    words = f"{from_to(before, after)} {where}"
    if math.isinf(noise):
        return f"{name} went {words}: {len(logged.values)} logged steps are too little to judge", "unknown"
    if abs(after - before) <= noise:
        return f"No change to speak of: {curve.name} went {words}", "same"
    if after > before:
        return f"It learned: {curve.name} rose {words}", "better"
    return f"It got worse: {curve.name} fell {words}", "worse"


def _noise(values: Sequence[float], window: int) -> float:
    """Return two standard errors of the difference of two means of `window` entries; infinite for too few values."""
    jumps = [later - earlier for earlier, later in itertools.pairwise(values)]
    if len(jumps) < 3:
        return math.inf
    return 2 * statistics.pstdev(jumps) / math.sqrt(window)  # a jump's variance is that of two entries


def _warnings(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    if summary.why_padded:
        yield (
            f"Packing was off: {summary.why_padded}. Padded batches give the same results in more time; "
            "packing: true stops such a run before its first step."
        )
    sampled, scored = (
        len(series.get(key, Series()).values) for key in ("completions/mean_length", summary.kind.curves[0].key)
    )
    if summary.kind is not REWARD_MODEL and scored < sampled:
        yield (
            f"In {sampled - scored} of {sampled} logged steps no completion had a reward: every reward function gave "
            "None or NaN. `trl-ext score explain` shows what a rule reads."
        )
    for rule, found in ((key.split("/")[1], _last(series, key)) for key in series if key.endswith("/no_answer_frac")):
        if found and found > SAME_REWARD_FRAC:
            yield (
                f"Rule '{rule}' found no answer in {found:.0%} of the last completions. Read the samples in "
                "report.html, and ask for the form that the rule reads: `trl-ext score explain` shows it."
            )
    cut, same = (_last(series, key) or 0.0 for key in ("completions/clipped_ratio", "frac_reward_zero_std"))
    cut_off = (
        f"{cut:.0%} of the last completions were cut off at max_completion_length. Give them more tokens, or let a "
        "rule reward short ones."
    )
    earned = [series[key].values[-1] for key, _ in _RULES.members(series)] or [math.nan]
    advice = "Choose prompts that are neither too easy nor too hard."
    if min(earned) >= 1:
        advice = "All reach the maximum reward: choose harder prompts, or a finer reward."
    elif max(earned) <= 0:
        advice = "All reach the minimum reward: choose easier prompts, or reward steps on the way."
    alike = f"In {same:.0%} of the last groups all completions earned the same: these teach nothing. {advice}"
    shares = [(cut, TRUNCATED_FRAC, cut_off), (same, SAME_REWARD_FRAC, alike)]
    if min(earned) >= 1:  # cut-off completions that earn the most are no cause
        shares.reverse()
    yield from (words for share, least, words in sorted(shares, key=lambda one: -one[0]) if share > least)
    yield from _divergence(series, summary)
    entropy = series.get("entropy")
    if entropy and len(entropy.values) > 1 and (left := _last(series, "entropy")) is not None:
        begin = statistics.fmean(entropy.values[: _window(entropy)])
        if 0 <= left < ENTROPY_LEFT_FRAC * begin:
            yield f"Entropy fell from {short(begin)} to {short(left)}: completions hardly differ. Lower learning_rate."
    if summary.kind is PPO and (explained := _last(series, "ppo/explained_variance")) is not None and explained < 0:
        yield (
            f"The critic's explained variance ended at {score(explained)}: it predicts returns worse than their mean "
            "does. Give it critic_warmup_steps, or a higher learning rate."
        )
    yield from _overlap(series)
    yield from _rules(series)
    key = HELD_OUT + "score_length_correlation"
    if (correlation := _last(series, key)) is not None and abs(correlation) > LENGTH_CORRELATION:
        yield (
            f"Scores and lengths of held-out answers correlate by {score(correlation)}: does it judge length? Add "
            "pairs whose better side is shorter."
        )
    training, held_out = _last(series, "accuracy"), _last(series, f"{HELD_OUT}accuracy")
    if training is not None and held_out is not None and training - held_out > OVERFIT_GAP:
        yield (
            f"Accuracy is {score(training)} in training and {score(held_out)} on held-out pairs: it overfits. Train "
            "fewer epochs, lower learning_rate, or add pairs."
        )
    for phase, planned, measured, difference in list(summary.memory)[1:]:
        if planned != "-" and float(measured) > MEMORY_OVER_PLAN * float(planned):
            yield f"Phase {phase} took {measured} GiB where {planned} were planned ({difference})."


def _overfit(series: Mapping[str, Series], summary: RunSummary, measures: Sequence[str]) -> Iterator[str]:
    """Warn of held-out metrics that fall after their best value while the reward in training rises."""
    reward = summary.kind.curves[0]
    training = series.get(reward.key, Series())
    for name in dict.fromkeys([reward.key, *measures]):
        held_out = series.get(HELD_OUT + name, Series())
        if summary.kind is REWARD_MODEL or not held_out.values:
            continue
        best, last = max(held_out.values), held_out.values[-1]
        step = held_out.steps[held_out.values.index(best)]
        later = [value for at, value in zip(training.steps, training.values, strict=True) if at > step]
        rose = _change(Series(values=later)) if later else 0.0
        if rose > 0 and best - last > OUTBID * max(1.0, abs(best)):
            what = name.replace("rewards/", "").removesuffix("/mean").replace("_", " ", 1)
            yield (
                f"Held-out {what} fell from {score(best)} in step {step:,} to {score(last)} while the {reward.name} "
                f"in training rose by {short(rose)}: they part. The policy learns what pays and not what is measured: "
                f"take the model of step {step:,}, and mend the reward."
            )


def _overlap(series: Mapping[str, Series]) -> Iterator[str]:
    """Warn if training or the vLLM servers wait for each other, when samples are generated ahead."""
    took = series.get("sampling/generation_s")
    phases = [values for key, values in series.items() if key.startswith("phase/")]
    if not took or not phases:
        return
    waited = series.get("phase/generate_wait_s")
    step_s = sum(sum(values.values) for values in phases) / len(took.values)
    waits, idle = sum(waited.values) / len(took.values) if waited else 0.0, step_s - statistics.fmean(took.values)
    if waits > IDLE_FRAC * step_s:
        yield (
            f"Training waited {waits / step_s:.0%} of the time for samples that are generated ahead. Give more cards "
            "to vLLM (--vllm_servers), or let completions be shorter."
        )
    elif idle > IDLE_FRAC * step_s:
        yield (
            f"The vLLM servers were idle {idle / step_s:.0%} of the time: training is the slower side. Give it more "
            "cards, and --vllm_servers fewer."
        )


def _divergence(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of a high KL per token; GRPO logs it, PPO logs the sum over a completion."""
    kl = series.get("kl")
    lengths = series.get("completions/mean_length")
    values = kl.values if kl else []
    if not kl and "objective/kl" in series and lengths:
        kl = series["objective/kl"]
        tokens = dict(zip(lengths.steps, lengths.values, strict=True))
        values = [v / max(tokens.get(step, math.inf), 1) for step, v in zip(kl.steps, kl.values, strict=True)]
    if kl and max(values) > KL_PER_TOKEN:
        step = kl.steps[values.index(max(values))]
        yield (
            f"KL to the reference reached {short(max(values))} nats per token in step {step:,}: the policy is far "
            "from where it began. Lower the learning rate or raise the penalty."
        )


def _rules(series: Mapping[str, Series]) -> Iterator[str]:
    for key, values in series.items():
        rule, _, metric = key.removeprefix("rules/").rpartition("/")
        if key.startswith("rules/") and metric in _WITHOUT_VALUE:
            share = statistics.fmean(values.values)
            if share > NO_VALUE_FRAC or (metric == "error_frac" and share > 0):
                yield f"Rule '{rule}' {_WITHOUT_VALUE[metric].format(share)}"
    rose = _change(series["reward"]) if "reward" in series else 0.0
    for key, curve in _RULES.members(series) if rose > OUTBID else ():
        if (fell := -_change(series[key])) > OUTBID:
            what = f"Rule '{curve.name}' fell by {short(fell)} while the reward rose by {short(rose)}: is it outbid?"
            yield f"{what} Raise its weight, or let it gate the others."


def _window(series: Series) -> int:
    return max(1, min(5, len(series.values) // 4))


def _last(series: Mapping[str, Series], key: str) -> float | None:
    """Return the mean of the last entries of a key, for a held-out key the last entry."""
    found = series.get(key)
    if found is None:
        return None
    return found.values[-1] if key.startswith(HELD_OUT) else statistics.fmean(found.values[-_window(found) :])


def _change(series: Series) -> float:
    """Return the mean of the last quarter minus the mean of the first quarter; 0 within the noise."""
    window = max(1, len(series.values) // 4)
    change = statistics.fmean(series.values[-window:]) - statistics.fmean(series.values[:window])
    return change if abs(change) > _noise(series.values, window) else 0.0

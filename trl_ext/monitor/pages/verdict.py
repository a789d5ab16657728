"""The verdict on a run: whether it learned, whether it ended, and warnings."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trl_ext.monitor.log_keys import ERROR, HELD_OUT, PPO, REWARD_MODEL, Curve, Entry, Series
from trl_ext.monitor.summary import Change, RunSummary
from trl_ext.monitor.words import cut, duration, from_to, score, short

# Thresholds of warnings. A warning does not prove a fault.
TRUNCATED_FRAC = 0.1
MOST_FRAC = 0.5
KL_PER_TOKEN = 1.0
ENTROPY_LEFT_FRAC = 0.1
SUDDEN_FRAC = 0.25
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
_LEARNED = "It learned: "
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


@dataclass(frozen=True, slots=True)
class _Headline:
    """A sentence, and its mood as in `RunVerdict`."""

    text: str
    mood: str


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
    failure = _broken(log_history)
    error = next((entry for entry in log_history if ERROR in entry), None)
    main = _headline(log_history, series, summary, error)
    is_finished = summary.num_steps >= max_steps if max_steps else summary.train_s is not None
    warnings = [failure] if failure else []
    warnings += [*_overfit(series, summary, measures)]
    for warn in _WARNINGS:
        warnings += warn(series, summary)
    if not warnings and main.mood == "worse" and not error:
        warnings = [_WORSE]
    if faster_generation and (share := _share_of_generation(summary)) > GENERATION_FRAC:
        warnings.append(f"Generation took {share:.0%} of the time. {faster_generation}")
    if len(warnings) > MOST_WARNINGS:
        warnings[MOST_WARNINGS - 1 :] = [f"And {len(warnings) - MOST_WARNINGS + 1} more of the kind."]
    state = _state(summary, has_failed=bool(failure or error), is_finished=is_finished)
    return RunVerdict(
        headline=main.text,
        mood=main.mood,
        ending=f"{state}: {_steps_in_words(summary, max_steps)}",
        is_finished=is_finished and not failure,
        warnings=tuple(warnings),
    )


def _headline(
    log_history: Sequence[Entry], series: Mapping[str, Series], summary: RunSummary, error: Entry | None
) -> _Headline:
    """Return the headline: the error that ended the run, else that hardly anything was trained, else what it learned.

    Args:
        log_history, series, summary: The log, and what was read of it.
        error: The entry with the error that ended the run, None without.
    """
    if error:
        return _Headline(f"It failed after step {error['step']}: {cut(error[ERROR], MOST_CHARS)}", "worse")
    learned = _learning(series, summary)
    untrained = _without_gradient(log_history, learned.mood)
    if learned.mood == "better" and _collapses(series):
        learned = _Headline(f"The policy collapsed, though {learned.text.removeprefix(_LEARNED)}", "worse")
    return _Headline(untrained, "worse") if untrained else learned


def _state(summary: RunSummary, *, has_failed: bool, is_finished: bool) -> str:
    """Return how the run ended, in words that begin a sentence."""
    if has_failed:
        return "Failed"
    if is_finished:
        return "Finished"
    return "Stopped or still running" if summary.train_s is None else "Ended early"


def _without_gradient(log_history: Sequence[Entry], mood: str) -> str:
    """Return the headline of a run in which most logged steps had no gradient, else ""; all steps if it got better."""
    norms = [entry for entry in log_history if "grad_norm" in entry]
    # The gradient norm is of the last step only; the share of skipped rows is of all steps of the entry.
    idle = [e for e in norms if e["grad_norm"] == 0 and e.get("packing/skipped_rows_frac", 1) == 1]
    steps = f"{len(idle):,} of {len(norms):,} logged steps had no gradient"
    if norms and len(idle) == len(norms):
        return f"Nothing was trained: {steps}"
    if 2 * len(idle) > len(norms) and mood != "better":
        return f"Hardly anything was trained: {steps}"
    return ""


def _broken(log_history: Sequence[Entry]) -> str:
    """Return a sentence on the first loss or gradient norm that is not finite, "" if all are."""
    for entry in log_history:
        for key in ("loss", "grad_norm"):
            number = entry.get(key)
            if isinstance(number, float) and not math.isfinite(number):
                return (
                    f"{key} was {number} in step {entry.get('step', '?')}: from there on the weights may be broken. "
                    "Resume from an earlier checkpoint with a lower learning_rate, max_grad_norm of 1.0 or less, and "
                    "bf16 instead of fp16."
                )
    return ""


def _steps_in_words(summary: RunSummary, max_steps: int | None) -> str:
    planned = f" of {max_steps:,}" if max_steps else ""
    time = "" if summary.train_s is None else f" in {duration(summary.train_s)}"
    return f"{summary.num_steps:,}{planned} steps{time}"


def _share_of_generation(summary: RunSummary) -> float:
    """Return the share of generation in the seconds of training, 0 to 1."""
    seconds = summary.step_phase_s
    return seconds.get("generate", 0.0) / max(sum(seconds.values()), 1e-9)


def _learning(series: Mapping[str, Series], summary: RunSummary) -> _Headline:
    """Return the headline from the run's main curve, on held-out rows if it was evaluated before and after."""
    curve = summary.kind.curves[0]
    change = summary.held_out.get(curve, Change())
    where, logged = f"on {summary.kind.held_out_title.lower()}", Series()
    if change.before is None or change.after is None:
        change = summary.training.get(curve, Change())
        where, logged = "in training", series.get(curve.key, Series())
    name = curve.name[0].upper() + curve.name[1:]
    before, after = change.before, change.after
    if before is None or after is None:
        return _Headline(f"There is no {curve.name} in the log", "unknown")
    if len(logged.values) == 1:
        return _Headline(f"{name} {score(after)} in the only logged step: too little to judge", "unknown")
    noise = _SMALL * max(abs(before), abs(after))
    if logged.values:
        noise = max(noise, _noise(logged.values, _window(logged)))
    words = f"{from_to(before, after)} {where}"
    if math.isinf(noise):
        too_few = f"{len(logged.values)} logged steps are too little to judge"
        return _Headline(f"{name} went {words}: {too_few}", "unknown")
    if abs(after - before) <= noise:
        return _Headline(f"No change to speak of: {curve.name} went {words}", "same")
    if after > before:
        return _Headline(f"{_LEARNED}{curve.name} rose {words}", "better")
    return _Headline(f"It got worse: {curve.name} fell {words}", "worse")


def _noise(values: Sequence[float], window: int) -> float:
    """Return two standard errors of the difference of two means of `window` entries; infinite for too few values."""
    jumps = [later - earlier for earlier, later in itertools.pairwise(values)]
    if len(jumps) < 3:
        return math.inf
    return 2 * statistics.pstdev(jumps) / math.sqrt(window)  # a jump's variance is that of two entries


def _packing_off(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn if batches were padded against the settings."""
    if summary.why_padded:
        yield (
            f"Packing was off: {summary.why_padded}. Padded batches give the same results in more time; "
            "packing: true stops such a run before its first step."
        )


def _without_reward(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of logged steps in which no completion had a reward."""
    sampled = len(series.get("completions/mean_length", Series()).values)
    scored = len(series.get(summary.kind.curves[0].key, Series()).values)
    if summary.kind is not REWARD_MODEL and scored < sampled:
        yield (
            f"In {sampled - scored} of {sampled} logged steps no completion had a reward: every reward function gave "
            "None or NaN. `trl-ext score explain` shows what a rule reads."
        )


def _without_signal(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of completions cut off, of rules that found no answer, and of groups of equal rewards, a cause first.

    Where most completions were cut off, that is why there are no answers, and groups without answers earn the same.
    """
    cut_off, found = _cut_off(series), [*_without_answer(series), _alike(series)]
    earns_the_most = min(_last_rewards(series)) >= 1
    is_cause = cut_off.share > MOST_FRAC and not earns_the_most
    for warning in [cut_off, *found] if is_cause else [*found, cut_off]:
        if warning.share > warning.least:
            yield warning.words


@dataclass(frozen=True, slots=True)
class _Share:
    """A share of completions or groups (0 to 1), the share above which it is worth a sentence, and the sentence."""

    share: float
    least: float
    words: str


def _cut_off(series: Mapping[str, Series]) -> _Share:
    """Return the share of the last completions that were cut off."""
    share = _share(series, "completions/clipped_ratio")
    words = (
        f"{share:.0%} of the last completions were cut off at max_completion_length. Give them more tokens, or let "
        "a rule reward short ones."
    )
    return _Share(share, TRUNCATED_FRAC, words)


def _without_answer(series: Mapping[str, Series]) -> Iterator[_Share]:
    """Return for each rule the share of the last completions in which it found no answer."""
    for key in series:
        # Keys of held-out rows begin with `eval_`: a rule gets one sentence.
        if key.startswith("rules/") and key.endswith("/no_answer_frac"):
            share = _share(series, key)
            words = (
                f"Rule '{key.split('/')[1]}' found no answer in {share:.0%} of the last completions. Read the samples "
                "in report.html, and ask for the form that the rule reads: `trl-ext score explain` shows it."
            )
            yield _Share(share, MOST_FRAC, words)


def _alike(series: Mapping[str, Series]) -> _Share:
    """Return the share of the last groups in which all completions earned the same."""
    share = _share(series, "frac_reward_zero_std")
    advice = "Choose prompts that are neither too easy nor too hard, or raise num_generations."
    earned = _last_rewards(series)
    if min(earned) >= 1:
        advice = "All reach the maximum reward: choose harder prompts, or a finer reward."
    elif max(earned) <= 0:
        advice = "All reach the minimum reward: choose easier prompts, or reward steps on the way."
    words = f"In {share:.0%} of the last groups all completions earned the same: these teach nothing. {advice}"
    return _Share(share, MOST_FRAC, words)


def _last_rewards(series: Mapping[str, Series]) -> list[float]:
    """Return the last mean value of each reward function; NaN alone if none is logged."""
    return [series[key].values[-1] for key, _ in _RULES.members(series)] or [math.nan]


def _entropy(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn if the entropy fell to a small share of its first values without a better reward, or by much in an update.

    A policy that has learned is sure of its answers: a slow fall to little entropy is then no fault.
    """
    entropy, left = series.get("entropy", Series()), _last(series, "entropy")
    begin = statistics.fmean(entropy.values[: _window(entropy)] or [0.0])
    is_better = _learning(series, summary).mood == "better"
    if left is not None and 0 <= left < ENTROPY_LEFT_FRAC * begin and not is_better:
        yield f"Entropy fell from {short(begin)} to {short(left)}: completions hardly differ. Lower learning_rate."
    else:
        yield from _collapses(series)[:1]


def _collapses(series: Mapping[str, Series]) -> list[str]:
    """Return a sentence on each update that took most of the entropy."""
    entropy = series.get("entropy", Series())
    # Late in a run little is left to fall.
    floor = SUDDEN_FRAC * max(entropy.values[:1], default=0.0)
    logged = itertools.pairwise(zip(entropy.steps, entropy.values, strict=True))
    return [
        f"Entropy fell from {short(before)} to {short(after)} by one update, in step {step:,}: completions hardly "
        "differed from there on. Lower learning_rate."
        for (step, before), (next_step, after) in logged
        if next_step == step + 1 and before > floor and 0 <= after < SUDDEN_FRAC * before
    ]


def _critic(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of a critic that predicts worse than a constant."""
    explained = _last(series, "ppo/explained_variance") if summary.kind is PPO else None
    if explained is not None and explained < 0:
        yield (
            f"The critic's explained variance ended at {score(explained)}: it predicts returns worse than their mean "
            "does. Give it critic_warmup_steps, or a higher learning rate."
        )


def _length(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of a reward model whose scores follow the length."""
    correlation = _last(series, HELD_OUT + "score_length_correlation")
    if correlation is not None and abs(correlation) > LENGTH_CORRELATION:
        yield (
            f"Scores and lengths of held-out answers correlate by {score(correlation)}: does it judge length? Add "
            "pairs whose better side is shorter."
        )


def _accuracy_gap(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of a reward model that is much better on its training pairs."""
    training, held_out = _last(series, "accuracy"), _last(series, f"{HELD_OUT}accuracy")
    if training is not None and held_out is not None and training - held_out > OVERFIT_GAP:
        yield (
            f"Accuracy is {score(training)} in training and {score(held_out)} on held-out pairs: it overfits. Train "
            "fewer epochs, lower learning_rate, or add pairs."
        )


def _memory(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of phases that took more memory than the plan."""
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


def _overlap(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
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


def _rules(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of rules that gave no value."""
    for key, values in series.items():
        rule, _, metric = key.removeprefix("rules/").rpartition("/")
        if key.startswith("rules/") and metric in _WITHOUT_VALUE:
            share = statistics.fmean(values.values)
            if share > NO_VALUE_FRAC or (metric == "error_frac" and share > 0):
                yield f"Rule '{rule}' {_WITHOUT_VALUE[metric].format(share)}"


def _outbid(series: Mapping[str, Series], summary: RunSummary) -> Iterator[str]:
    """Warn of rules that fell while the reward rose, in training or from the first to the last evaluation."""
    training = {key: _change(series[key]) for key in series if key == "reward" or _RULES.member(key)}
    held_out = {
        curve.key: change.after - change.before
        for curve, change in summary.held_out.items()
        if change.before is not None and change.after is not None
    }
    for key, curve in _RULES.members(series):
        for changes, where in ((training, ""), (held_out, " on held-out rows")):
            rose, fell = changes.get("reward", 0.0), -changes.get(key, 0.0)
            # A few held-out rows are noisy: what rises in training did not fall.
            if rose > OUTBID and fell > OUTBID and training[key] <= 0:
                yield (
                    f"Rule '{curve.name}' fell by {short(fell)} while the reward rose by {short(rose)}{where}: is it "
                    "outbid? Raise its weight, or let it gate the others."
                )
                break


# In the order of the page: a cause before what follows from it, and what stopped the learning before what it cost.
_WARNINGS = (
    _packing_off,
    _without_reward,
    _divergence,
    _entropy,
    _outbid,
    _without_signal,
    _critic,
    _overlap,
    _rules,
    _length,
    _accuracy_gap,
    _memory,
)


def _window(series: Series) -> int:
    return max(1, min(5, len(series.values) // 4))


def _last(series: Mapping[str, Series], key: str) -> float | None:
    """Return the mean of the last entries of a key, for a held-out key the last entry."""
    found = series.get(key)
    if found is None:
        return None
    return found.values[-1] if key.startswith(HELD_OUT) else statistics.fmean(found.values[-_window(found) :])


def _share(series: Mapping[str, Series], key: str) -> float:
    """Return the mean of the last entries of a share, 0 to 1; 0 for a key that is not logged."""
    return _last(series, key) or 0.0


def _change(series: Series) -> float:
    """Return the mean of the last quarter minus the mean of the first quarter; 0 within the noise."""
    window = max(1, len(series.values) // 4)
    change = statistics.fmean(series.values[-window:]) - statistics.fmean(series.values[:window])
    return change if abs(change) > _noise(series.values, window) else 0.0

"""What a run came to, in numbers, from the log history that every Trainer keeps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Entry

# Steps averaged at either end of the run; fewer in runs shorter than four times this.
WINDOW_STEPS = 5


@dataclass(frozen=True, slots=True)
class Change:
    """A mean reward at two times. None where nothing was logged."""

    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run.

    Args:
        num_steps: Last optimizer step in the log.
        window_steps: Logged steps that are averaged at either end for `reward` and `rules`.
        reward: Mean training reward of the first and of the last steps.
        rules: The same per rule.
        held_out_reward: Mean reward on the evaluation set before step 1 and at the last evaluation.
        held_out_rules: The same per rule; for a rule that scores 0 or 1 this is the accuracy.
        forwarded_tokens: Tokens that went through the model for log-probabilities and loss, all ranks, whole run.
        padded_tokens: Tokens that padded batches would have taken for the same.
        raw_tokens: Tokens without padding and without sharing prompts.
        phase_s: Seconds per phase over the whole run, on rank 0.
        train_s: Wall-clock seconds of `train()`.
    """

    num_steps: int
    window_steps: int
    reward: Change
    rules: Mapping[str, Change]
    held_out_reward: Change
    held_out_rules: Mapping[str, Change]
    forwarded_tokens: int | None = None
    padded_tokens: int | None = None
    raw_tokens: int | None = None
    phase_s: Mapping[str, float] | None = None
    train_s: float | None = None


def summarize(log_history: Sequence[Entry]) -> RunSummary:
    """The run's summary. Metrics that the history lacks are None or missing from their mapping."""
    training = training_entries(log_history)
    held_out = held_out_entries(log_history)
    window = max(1, min(WINDOW_STEPS, len(training) // 4))
    start = [entry for entry in held_out if not entry.get("step")]
    end = [entry for entry in held_out if entry.get("step")]
    before, after = (start[-1] if start else {}), (end[-1] if end else {})
    return RunSummary(
        num_steps=max((int(entry.get("step", 0)) for entry in log_history), default=0),
        window_steps=window,
        reward=_change(training[:window], training[-window:], log_keys.reward),
        rules={
            name: _change(training[:window], training[-window:], lambda entry, n=name: log_keys.rules(entry).get(n))
            for name in _names(training, log_keys.rules)
        },
        held_out_reward=Change(log_keys.reward(before, HELD_OUT), log_keys.reward(after, HELD_OUT)),
        held_out_rules={
            name: Change(log_keys.rules(before, HELD_OUT).get(name), log_keys.rules(after, HELD_OUT).get(name))
            for name in _names(held_out, lambda entry: log_keys.rules(entry, HELD_OUT))
        },
        forwarded_tokens=_total(log_history, _forwarded),
        padded_tokens=_total(log_history, lambda entry: log_keys.number(entry, "packing/padded_tokens")),
        raw_tokens=_total(log_history, _raw),
        phase_s=phase_totals(log_history),
        train_s=next((s for e in log_history if (s := log_keys.number(e, "train_runtime")) is not None), None),
    )


def training_entries(log_history: Sequence[Entry]) -> list[Entry]:
    """Entries with training rewards, in order."""
    return [entry for entry in log_history if log_keys.is_training(entry)]


def held_out_entries(log_history: Sequence[Entry]) -> list[Entry]:
    """Entries with evaluation rewards, in order."""
    return [entry for entry in log_history if log_keys.is_held_out(entry)]


def phase_totals(log_history: Sequence[Entry]) -> dict[str, float]:
    """Seconds per phase over the whole run."""
    totals: dict[str, float] = {}
    for entry, num_steps in _with_num_steps(log_history):
        for name, seconds in log_keys.phases(entry).items():
            totals[name] = totals.get(name, 0.0) + seconds * num_steps
    return totals


def _with_num_steps(log_history: Sequence[Entry]) -> Iterator[tuple[Entry, int]]:
    """Training entries with the number of optimizer steps that each of them averages."""
    last_step = 0
    for entry in training_entries(log_history):
        step = int(entry.get("step", last_step + 1))
        yield entry, max(step - last_step, 1)
        last_step = step


def _forwarded(entry: Entry) -> float | None:
    return log_keys.number(entry, "packing/forwarded_tokens")


def _raw(entry: Entry) -> float | None:
    logged = log_keys.number(entry, "packing/raw_tokens")
    forwarded, ratio = _forwarded(entry), log_keys.number(entry, "packing/forwarded_over_raw")
    return forwarded / ratio if logged is None and forwarded and ratio else logged


def _total(log_history: Sequence[Entry], value_of: Callable[[Entry], float | None]) -> int | None:
    """Sum over optimizer steps of a metric that is logged as a mean per step, None if it never is."""
    values = [(value_of(entry), num_steps) for entry, num_steps in _with_num_steps(log_history)]
    known = [value * num_steps for value, num_steps in values if value is not None]
    return round(sum(known)) if known else None


def _change(first: Sequence[Entry], last: Sequence[Entry], value_of: Callable[[Entry], float | None]) -> Change:
    return Change(_mean(first, value_of), _mean(last, value_of))


def _mean(entries: Sequence[Entry], value_of: Callable[[Entry], float | None]) -> float | None:
    values = [value for value in map(value_of, entries) if value is not None]
    return fmean(values) if values else None


def _names(entries: Sequence[Entry], rules_of: Callable[[Entry], Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in rules_of(entry)))

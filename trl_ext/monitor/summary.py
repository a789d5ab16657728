"""A run's summary in numbers and tables, from the log history that every Trainer keeps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import FASTER, HELD_OUT, KERNELS, WHY_PADDED, Curve, Entry, RunKind
from trl_ext.monitor.words import score, without_empty_columns

# Log entries with new completions to average at either end of a run; fewer in a run shorter than four times this.
WINDOW_ENTRIES = 5
MEMORY_HEADER = ["memory", "predicted GiB", "measured GiB", "difference"]


@dataclass(frozen=True, slots=True)
class Change:
    """A curve at two times; None if nothing was logged."""

    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The results of a run.

    Args:
        num_steps: Last optimizer step in the log.
        window_steps: Optimizer steps that are averaged at either end for `training`.
        training: Curves over the first and the last steps. For GRPO the reward and every rule.
        held_out: Curves on the evaluation set, before step 1 and at the last evaluation.
        forwarded_tokens: Tokens through the model for log-probabilities and loss, all ranks, whole run.
        padded_tokens: Tokens of the same rows in padded batches.
        skipped_tokens: Tokens of rows that were left out because they have no gradient.
        raw_tokens: Tokens without padding and without sharing prompts.
        phase_s: Seconds per phase over the whole run, on rank 0.
        train_s: Wall-clock seconds of `train()`.
        memory: Rows of the table of memory, empty if it was not measured.
        why_padded: Why rows were padded though packing was not turned off; empty if they were not.
        kernels: Names of the kernels of attention and of layers.
        faster: Packages and settings that would shorten updates on this card; empty if none are known.
    """

    kind: RunKind
    num_steps: int
    window_steps: int
    training: Mapping[Curve, Change]
    held_out: Mapping[Curve, Change]
    forwarded_tokens: int | None = None
    padded_tokens: int | None = None
    raw_tokens: int | None = None
    skipped_tokens: int | None = None
    phase_s: Mapping[str, float] | None = None
    train_s: float | None = None
    memory: Sequence[Sequence[str]] = ()
    why_padded: str = ""
    kernels: str = ""
    faster: str = ""

    @property
    def step_phase_s(self) -> dict[str, float]:
        """Seconds of the phases that are part of a step: all but evaluation."""
        return {name: seconds for name, seconds in (self.phase_s or {}).items() if name != log_keys.EVALUATE}


def summarize(log_history: Sequence[Entry]) -> RunSummary:
    """Summarize a run. Metrics that the history lacks are None or missing from their mapping."""
    training = training_entries(log_history)
    held_out = held_out_entries(log_history)
    # Average entries with new completions at either end, with the following entries that reuse these.
    kind = log_keys.kind_of(training)
    starts = [place for place, entry in enumerate(training) if kind.is_scored_in(entry)]
    window = max(1, min(WINDOW_ENTRIES, len(starts) // 4))
    first = last = training
    if len(starts) > window:
        first, last = training[: starts[window]], training[starts[-window] :]
    phase_s: dict[str, float] = {}
    for entry, num_steps in _with_num_steps(training):
        for name, seconds in log_keys.phases(entry).items():
            phase_s[name] = phase_s.get(name, 0.0) + seconds * num_steps
    start = [entry for entry in held_out if not entry.get("step")]
    end = [entry for entry in held_out if entry.get("step")]
    return RunSummary(
        kind=log_keys.kind_of(log_history),
        num_steps=max((int(entry.get("step", 0)) for entry in log_history), default=0),
        window_steps=sum(num_steps for _, num_steps in list(_with_num_steps(training))[: len(first)]) or 1,
        training=_changes(_curves(training), _means(first), _means(last)),
        held_out=_changes(_curves(held_out, HELD_OUT), _means(start[-1:], HELD_OUT), _means(end[-1:], HELD_OUT)),
        forwarded_tokens=_total(log_history, "forwarded"),
        padded_tokens=_total(log_history, "padded"),
        raw_tokens=_total(log_history, "raw"),
        skipped_tokens=_total(log_history, "skipped"),
        phase_s=phase_s,
        train_s=next((s for e in log_history if (s := log_keys.number(e, "train_runtime")) is not None), None),
        memory=memory_rows(log_history),
        why_padded=_last_text(log_history, WHY_PADDED),
        kernels=_last_text(log_history, KERNELS),
        faster=_last_text(log_history, FASTER),
    )


def _last_text(log_history: Sequence[Entry], key: str) -> str:
    return next((str(entry[key]) for entry in reversed(log_history) if key in entry), "")


def training_entries(log_history: Sequence[Entry]) -> list[Entry]:
    """Return the entries with a training curve, in order."""
    return [entry for entry in log_history if log_keys.kind_of_entry(entry)]


def held_out_entries(log_history: Sequence[Entry]) -> list[Entry]:
    """Return the entries of evaluations, in order."""
    return [entry for entry in log_history if log_keys.kind_of_entry(entry, HELD_OUT)]


def memory_rows(log_history: Iterable[Entry]) -> list[list[str]]:
    """Return a header and a row for each phase with its highest peak; empty if memory was not measured."""
    measured: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for entry in log_history:
        predicted |= log_keys.family(entry, "memory/predicted_", "_gib")  # from the plan, in the first entry
        for phase, peak in log_keys.memory(entry).items():
            measured[phase] = max(peak, measured.get(phase, 0.0))
    rows = []
    for phase, peak in measured.items():
        planned = predicted.get(phase)
        difference = f"{peak / planned - 1:+.1%}" if planned else "-"
        rows.append([phase, "-" if planned is None else f"{planned:.1f}", f"{peak:.1f}", difference])
    return [MEMORY_HEADER, *rows] if rows else []


def _with_num_steps(log_history: Sequence[Entry]) -> Iterator[tuple[Entry, int]]:
    """Yield training entries with the number of optimizer steps that each averages."""
    last_step = 0
    for entry in training_entries(log_history):
        step = int(entry.get("step", last_step + 1))
        yield entry, max(step - last_step, 1)
        last_step = step


def _total(log_history: Sequence[Entry], name: str) -> int | None:
    """Sum a token count over optimizer steps from its logged means per step; None if it is never logged."""
    known = []
    for entry, num_steps in _with_num_steps(log_history):
        value = log_keys.number(entry, f"packing/{name}_tokens")
        if value is None and name == "raw":
            forwarded = log_keys.number(entry, "packing/forwarded_tokens")
            ratio = log_keys.number(entry, "packing/forwarded_over_raw")
            value = forwarded / ratio if forwarded and ratio else None
        if value is not None:
            known.append(value * num_steps)
    return round(sum(known)) if known else None


def _curves(entries: Iterable[Entry], prefix: str = "") -> Iterable[Curve]:
    """Return every curve that any entry has."""
    latest: dict[str, float] = {}
    for entry in entries:
        latest |= {key: value for key in entry if (value := log_keys.number(entry, key)) is not None}
    return log_keys.values(latest, prefix)


def _means(entries: Sequence[Entry], prefix: str = "") -> dict[Curve, float]:
    """Return the mean of every curve over the entries that have it."""
    values: dict[Curve, list[float]] = {}
    for entry in entries:
        for curve, value in log_keys.values(entry, prefix).items():
            values.setdefault(curve, []).append(value)
    return {curve: fmean(several) for curve, several in values.items()}


def _changes(
    curves: Iterable[Curve], before: Mapping[Curve, float], after: Mapping[Curve, float]
) -> dict[Curve, Change]:
    return {curve: Change(before.get(curve), after.get(curve)) for curve in curves}


# Tables as rows of text, for the terminal and the page -------------------------------------------------------------

Rows = list[list[str]]


def curve_rows(summary: RunSummary) -> Rows:
    """Return a header and one row per curve; held-out columns only if there was an evaluation."""
    window = "step" if summary.window_steps == 1 else f"{summary.window_steps} steps"
    rows = [["", f"first {window}", f"last {window}", "held-out before", "held-out after"]]
    kind = summary.kind
    for curve in kind.in_order([kind.curves[0], *summary.training, *summary.held_out]):
        changes = [part.get(curve, Change()) for part in (summary.training, summary.held_out)]
        rows.append([curve.name, *(score(value) for change in changes for value in (change.before, change.after))])
    evaluated = any(cell != "-" for row in rows[1:] for cell in row[3:])
    return rows if evaluated else [row[:3] for row in rows]


def token_rows(summary: RunSummary) -> Rows:
    """Return rows with why rows are padded, kernels, tokens through the model, and tokens without packing."""
    rows = [["packing is off", f"{summary.why_padded}."]] if summary.why_padded else []
    rows += [["kernels", summary.kernels]] if summary.kernels else []
    rows += [["would be faster", f"{summary.faster}."]] if summary.faster else []
    if not summary.forwarded_tokens:
        return rows
    rows.append(["tokens forwarded", f"{summary.forwarded_tokens:,}"])
    for name, tokens in [
        ("as padded batches", summary.padded_tokens),
        ("unpadded, prompts repeated", summary.raw_tokens),
    ]:
        if tokens and tokens >= summary.forwarded_tokens:
            rows.append([name, f"{tokens:,} ({tokens / summary.forwarded_tokens:.2f} times as many)"])
    if summary.skipped_tokens:
        rows.append(["left out, without advantage", f"{summary.skipped_tokens:,}"])
    return rows


def phase_rows(summary: RunSummary) -> Rows:
    """Return phases with their share of the time, the longest first."""
    phases = sorted((summary.phase_s or {}).items(), key=lambda phase: -phase[1])
    total_s = sum(seconds for _, seconds in phases)
    return [[name, f"{seconds:.1f} s ({seconds / total_s:.0%})"] for name, seconds in phases if total_s > 0]


def entry_rows(kind: RunKind, entries: Sequence[Entry], prefix: str) -> Rows:
    """Return a header and one row per log entry, without empty columns."""
    values = [log_keys.values(entry, prefix) for entry in entries]
    curves = kind.in_order(curve for found in values for curve in found)
    rows = [["step", *(curve.name for curve in curves), "completion tokens", "tokens forwarded", "seconds"]]
    for entry, found in zip(entries, values, strict=True):
        rows.append(
            [
                str(int(entry.get("step", 0))),
                *(score(found.get(curve)) for curve in curves),
                _cell(log_keys.number(entry, f"{prefix}completions/mean_length"), ".1f"),
                _cell(log_keys.number(entry, f"{prefix}packing/forwarded_tokens"), ",.0f"),
                _cell(log_keys.step_s(entry), ".1f"),
            ]
        )
    return without_empty_columns(rows) if entries else []


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)

"""Tables of a run as rows of text, for the terminal and for the page."""

from collections.abc import Sequence

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import Entry, RunKind
from trl_ext.monitor.summary import Change, RunSummary
from trl_ext.monitor.words import score

Rows = list[list[str]]


def curve_rows(summary: RunSummary) -> Rows:
    """Header and one row per curve; the held-out columns only where there was an evaluation."""
    window = "step" if summary.window_steps == 1 else f"{summary.window_steps} steps"
    rows = [["", f"first {window}", f"last {window}", "held-out before", "held-out after"]]
    kind = summary.kind
    for curve in kind.in_order([kind.curves[0], *summary.training, *summary.held_out]):
        changes = [part.get(curve, Change()) for part in (summary.training, summary.held_out)]
        rows.append([curve.name, *(score(value) for change in changes for value in (change.before, change.after))])
    evaluated = any(cell != "-" for row in rows[1:] for cell in row[3:])
    return rows if evaluated else [row[:3] for row in rows]


def token_rows(summary: RunSummary) -> Rows:
    """Tokens that went through the model, and those that other ways would have taken."""
    if not summary.forwarded_tokens:
        return []
    rows = [["tokens forwarded", f"{summary.forwarded_tokens:,}"]]
    for name, tokens in [
        ("as padded batches", summary.padded_tokens),
        ("unpadded, prompts repeated", summary.raw_tokens),
    ]:
        if tokens:
            rows.append([name, f"{tokens:,} ({tokens / summary.forwarded_tokens:.2f} times as many)"])
    if summary.skipped_tokens:
        rows.append(["left out, without advantage", f"{summary.skipped_tokens:,}"])
    return rows


def phase_rows(summary: RunSummary) -> Rows:
    """Phases with their share of the time, the longest first."""
    phases = sorted((summary.phase_s or {}).items(), key=lambda phase: -phase[1])
    total_s = sum(seconds for _, seconds in phases)
    return [[name, f"{seconds:.1f} s ({seconds / total_s:.0%})"] for name, seconds in phases if total_s > 0]


def entry_rows(kind: RunKind, entries: Sequence[Entry], prefix: str) -> Rows:
    """One row per log entry; columns that no entry fills are left out."""
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
    used = [column for column in range(len(rows[0])) if any(row[column] != "-" for row in rows[1:])]
    return [[row[column] for column in used] for row in rows] if entries else []


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)

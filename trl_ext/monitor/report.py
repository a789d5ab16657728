"""The end of a run on paper: a table in the terminal, `reward.png`, and `report.html`, one file that needs no other.

Everything is computed from `trainer.state.log_history`, which also stands in trainer_state.json, so that a report can
be made again long after the run.
"""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trl_ext.errors import DataError, SupportError
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Entry, RunKind
from trl_ext.monitor.plot import reward_png
from trl_ext.monitor.record import read_record
from trl_ext.monitor.summary import Change, RunSummary, held_out_entries, summarize, training_entries
from trl_ext.monitor.words import duration, score

STATE_FILE = "trainer_state.json"  # written by transformers
SETTINGS_FILE = "run_settings.json"
HTML_FILE = "report.html"
PNG_FILE = "reward.png"

Rows = list[list[str]]

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #8885; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: white; border-radius: 6px }
"""


def read_log_history(output_dir: str | Path) -> list[dict[str, Any]]:
    """The log history of a finished or stopped run.

    Raises:
        DataError: Neither the folder nor a checkpoint in it holds a readable trainer_state.json.
    """
    folder = Path(output_dir)
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    newest_first = sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    for path in [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in newest_first)]:
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8"))["log_history"]
            except (ValueError, KeyError) as error:
                raise DataError(f"{path} is damaged: {error}. Remove it to use an older checkpoint's.") from error
    raise DataError(f"There is no {STATE_FILE} in {folder} or its checkpoints. Give the --output_dir of a run.")


def read_settings(output_dir: str | Path) -> dict[str, str]:
    """The settings that `write_report` kept, empty if it was never called there."""
    path = Path(output_dir) / SETTINGS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_report(
    output_dir: str | Path, log_history: Sequence[Entry] | None = None, settings: Mapping[str, str] | None = None
) -> RunSummary:
    """Write report.html and reward.png of a run into its folder, and return the summary for the table.

    Args:
        output_dir: The run's folder, made if missing.
        log_history: `trainer.state.log_history`; None reads what the run has saved.
        settings: What the report shows as the run's settings; None takes those of the run's record.

    Raises:
        DataError: Nothing was saved, or a file of the run is damaged.
    """
    folder = Path(output_dir)
    log_history = read_log_history(folder) if log_history is None else log_history
    if settings is None:
        record = read_record(folder)
        settings = record.settings() if record else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS_FILE).write_text(json.dumps(dict(settings), indent=2) + "\n", encoding="utf-8")
    png = None
    try:
        png = reward_png(log_history)
        (folder / PNG_FILE).write_bytes(png)
    except SupportError as hint:
        print(hint, file=sys.stderr)
    (folder / HTML_FILE).write_text(report_html(log_history, settings, png), encoding="utf-8")
    return summarize(log_history)


def summary_table(summary: RunSummary) -> Group:
    """The short table that a run ends with, for rich to print."""
    time = "" if summary.train_s is None else f" in {duration(summary.train_s)}"
    table = _table(_curve_rows(summary), f"{summary.num_steps} steps{time}")
    facts = [": ".join(row) for row in _token_rows(summary)]
    facts += [", ".join(" ".join(row) for row in _phase_rows(summary))]
    memory = [_table(summary.memory)] if summary.memory else []
    return Group(table, *(Text(fact) for fact in facts if fact), *memory)


def _table(rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Rows below their header, for rich."""
    header, *rows = rows
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column == 0 else "right", no_wrap=column == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a rule's name is no markup
    return table


def report_html(log_history: Sequence[Entry], settings: Mapping[str, str], png: bytes | None) -> str:
    """The report as one HTML document without outside resources."""
    summary = summarize(log_history)
    kind = summary.kind
    alt = f"{', '.join(kind.axes)} per step"
    image = "" if png is None else f'<img alt="{escape(alt)}" src="data:image/png;base64,{_base64(png)}">'
    sections = [
        (kind.title, _html_table(_curve_rows(summary)) + image),
        ("Tokens", _html_table(_token_rows(summary), header=False)),
        ("Time", _html_table(_phase_rows(summary), header=False)),
        ("Memory", _html_table(summary.memory)),
        ("Settings", _html_table([[key, str(value)] for key, value in settings.items()], header=False)),
        (kind.held_out_title, _html_table(_entry_rows(kind, held_out_entries(log_history), HELD_OUT))),
        ("Steps", _html_table(_entry_rows(kind, training_entries(log_history), ""))),
    ]
    body = "\n".join(f"<h2>{title}</h2>\n{content}" for title, content in sections if content)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<title>trl_ext report</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{summary.num_steps} steps</h1>\n{body}\n</html>\n"
    )


def _curve_rows(summary: RunSummary) -> Rows:
    """Header and one row per curve; the held-out columns only where there was an evaluation."""
    window = "step" if summary.window_steps == 1 else f"{summary.window_steps} steps"
    rows = [["", f"first {window}", f"last {window}", "held-out before", "held-out after"]]
    kind = summary.kind
    for curve in kind.in_order([kind.curves[0], *summary.training, *summary.held_out]):
        changes = [part.get(curve, Change()) for part in (summary.training, summary.held_out)]
        rows.append([curve.name, *(score(value) for change in changes for value in (change.before, change.after))])
    evaluated = any(cell != "-" for row in rows[1:] for cell in row[3:])
    return rows if evaluated else [row[:3] for row in rows]


def _token_rows(summary: RunSummary) -> Rows:
    if not summary.forwarded_tokens:
        return []
    rows = [["tokens forwarded", f"{summary.forwarded_tokens:,}"]]
    for name, tokens in [
        ("as padded batches", summary.padded_tokens),
        ("unpadded, prompts repeated", summary.raw_tokens),
    ]:
        if tokens:
            rows.append([name, f"{tokens:,} ({tokens / summary.forwarded_tokens:.2f} times as many)"])
    return rows


def _phase_rows(summary: RunSummary) -> Rows:
    """Phases with their share of the time, the longest first."""
    phases = sorted((summary.phase_s or {}).items(), key=lambda phase: -phase[1])
    total_s = sum(seconds for _, seconds in phases)
    return [[name, f"{seconds:.1f} s ({seconds / total_s:.0%})"] for name, seconds in phases if total_s > 0]


def _entry_rows(kind: RunKind, entries: Sequence[Entry], prefix: str) -> Rows:
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


def _html_table(rows: Sequence[Sequence[str]], header: bool = True) -> str:
    """Rows as an HTML table, every cell escaped; empty without rows."""
    if not rows:
        return ""
    lines = []
    for index, row in enumerate(rows):
        tag = "th" if header and index == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

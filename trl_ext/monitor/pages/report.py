"""The report of a run: a table in the terminal, and `report.html`, a single file.

It is computed from `trainer.state.log_history`, which trainer_state.json contains, and from the run's folder, so that
it can be made again long after the run.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trl_ext.errors import DataError
from trl_ext.monitor.log_keys import PPO, REWARD_MODEL, Entry, read_series
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.samples import COMPLETIONS_FOLDER, Samples, read_samples
from trl_ext.monitor.pages.verdict import judge_run
from trl_ext.monitor.record import PLAN_FILE, RULES_FILE, RunRecord, read_record, read_state
from trl_ext.monitor.summary import RunSummary, curve_rows, phase_rows, summarize, token_rows
from trl_ext.monitor.words import duration

HTML_FILE = "report.html"
_MOST_NAMES_CHARS = 1 << 18  # of all names in a log


def write_report(output_dir: str | Path, log_history: Sequence[Entry] | None = None) -> RunSummary:
    """Write report.html into a run's folder, created if missing, and return the summary for the table.

    Args:
        log_history: `trainer.state.log_history`; None reads the run's saved log.

    Raises:
        DataError: Nothing was saved, or a file of the run is damaged.
    """
    folder = Path(output_dir)
    record = read_record(folder)
    max_steps = record.recipe.get("max_steps") if record else None
    if log_history is None:  # Otherwise a saved state may be of an earlier run in this folder.
        state = read_state(folder)
        log_history, max_steps = state["log_history"], state.get("max_steps", max_steps)
    summary = summarize(log_history)
    max_steps = max_steps if isinstance(max_steps, int) and max_steps > 0 else None
    page = report_page(log_history, run_facts(folder, log_history, summary, record, max_steps), summary)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HTML_FILE).write_text(page, encoding="utf-8")
    return summary


def run_facts(
    folder: Path, log_history: Sequence[Entry], summary: RunSummary, record: RunRecord | None, max_steps: int | None
) -> RunFacts:
    """Read the page's contents other than the log; files that the folder lacks are left out.

    Args:
        folder: The run's folder, or a checkpoint in it.
        log_history, summary: The log and its summary.
        record: The run's record; None if it wrote none.
        max_steps: Steps that the run was to take; None if not known.
    """
    trainer = {PPO: "PPO", REWARD_MODEL: "Reward model"}.get(summary.kind, "GRPO")
    samples = _read_samples(folder, log_history, record.recipe.get("reward_weights") if record else None)
    if record is None:
        return RunFacts(f"{trainer} run", max_steps=max_steps, samples=samples)
    model, versions = record.model, record.versions
    facts = [f"data: {short_name(record.dataset)}" if record.dataset else "", _start_time(versions), _machine(record)]
    return RunFacts(
        title=f"{trainer} on {short_name(model)}" if model else f"{trainer} run",
        facts=[fact for fact in facts if fact],
        settings=record.settings(),
        versions={name: str(number) for name, number in versions.get("packages", {}).items()},
        rules=_text(_of_run(folder, RULES_FILE)),
        plan=_text(_of_run(folder, PLAN_FILE)),
        planned=_planned(record.plan or {}),
        launch=str(versions.get("launch") or ""),
        max_steps=max_steps,
        measures=record.measures,
        faster_generation=record.faster_generation,
        samples=samples,
    )


def _read_samples(folder: Path, log_history: Sequence[Entry], weights: Any) -> Samples:
    """Read the run's completions to show; raise DataError if the log has more names than a page can show.

    Args:
        folder: The run's folder, or a checkpoint in it.
        log_history: The log, whose keys name the reward functions.
        weights: The recipe's weights of the reward functions, None without.
    """
    keys = {key.removeprefix("eval_") for entry in log_history for key in entry}
    names = {key.removeprefix("rewards/").removesuffix("/mean") for key in keys if key.startswith("rewards/")}
    if sum(map(len, keys)) > _MOST_NAMES_CHARS:
        raise DataError(f"The log of {folder} has {len(keys):,} names, more than a page can show. Log fewer.")
    return read_samples(_of_run(folder, COMPLETIONS_FOLDER).parent, names, weights)


def _machine(record: RunRecord) -> str:
    """Return the number of processes, unless each has a card, and the cards."""
    number = record.versions.get("num_processes") or 1
    if len(record.versions.get("cards") or ()) == number:
        return record.cards
    processes = f"{number} process{'es' if number != 1 else ''}"
    return f"{processes}, {record.cards}" if record.cards else processes


def _start_time(versions: Mapping[str, Any]) -> str:
    """Return when the run started, in UTC; "" if not known."""
    try:
        return f"{datetime.fromisoformat(str(versions.get('started'))):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return ""


def _planned(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a plan's memory and time by name; malformed entries are left out."""
    numbers = {key: value for key, value in plan.items() if isinstance(value, (int, float))}
    rows = [("settings", plan["label"])] if isinstance(plan.get("label"), str) else []
    if {"peak_gib", "usable_gib"} <= numbers.keys():
        where = f", in {plan['peak_phase']}" if isinstance(plan.get("peak_phase"), str) else ""
        rows.append(("memory at the peak", f"{plan['peak_gib']:.1f} of {plan['usable_gib']:.1f} GiB on a card{where}"))
    if "step_s" in numbers:
        rows.append(("time of a step", f"{plan['step_s']:.1f} s"))
    return rows


def _of_run(folder: Path, name: str) -> Path:
    """Return the path of a run's file, also if the folder is one of its checkpoints."""
    is_inside = folder.name.startswith("checkpoint-") and not (folder / name).exists()
    return (folder.parent if is_inside else folder) / name


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def short_name(name: str) -> str:
    """Return a Hub name unchanged, or the last two parts of a folder."""
    parts = Path(name).parts
    return "/".join(parts[-2:]) if len(parts) > 2 or name.startswith((".", "/")) else name


def print_report(output_dir: str | Path, log_history: Sequence[Entry], summary: RunSummary) -> None:
    """Print a run's final table, tokens, seconds by phase, verdict, and the path of its report."""
    console = Console()
    console.print(summary_table(summary, log_history, output_dir))
    console.print(f"Report: {Path(output_dir, HTML_FILE)}", soft_wrap=True, markup=False, highlight=False)


def summary_table(summary: RunSummary, log_history: Sequence[Entry] = (), folder: str | Path = "") -> Group:
    """Return the final table of a run, with the verdict if its log is given, for rich to print."""
    time = "" if summary.train_s is None else f" in {duration(summary.train_s)}"
    table = table_of(curve_rows(summary), f"{summary.num_steps} steps{time}")
    facts = [": ".join(row) for row in token_rows(summary)]
    facts += [", ".join(" ".join(row) for row in phase_rows(summary))]
    parts: list[Any] = [table, *(Text(fact) for fact in facts if fact)]
    parts += [table_of(summary.memory)] if summary.memory else []
    if log_history:
        record = read_record(folder) if folder else None
        known = (record.measures, record.faster_generation) if record else ()
        verdict = judge_run(log_history, read_series(log_history), summary, None, *known)
        parts.append(Text(verdict.headline, "bold red" if verdict.mood == "worse" else "bold"))
        parts += [Text(f"* {warning}", "yellow") for warning in verdict.warnings]
    return Group(*parts)


def table_of(rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Return rows below their header, for rich to print."""
    header, *rows = rows
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column, name in enumerate(header):
        table.add_column(Text(name), justify="left" if column == 0 else "right", no_wrap=column == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text, because names of rules and folders are no markup
    return table

"""The report of a run: a table in the terminal, and `report.html`, a single file; a table of several runs; last lines.

It is computed from `trainer.state.log_history`, which trainer_state.json contains, and from the run's folder, so that
it can be made again long after the run.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trl_ext.errors import ConfigError, DataError
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import PPO, REWARD_MODEL, Entry, read_series
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.samples import COMPLETIONS_FOLDER, read_samples
from trl_ext.monitor.pages.verdict import judge_run
from trl_ext.monitor.record import LOG_FILE, PLAN_FILE, RULES_FILE, RunRecord, read_log, read_record
from trl_ext.monitor.summary import RunSummary, curve_rows, phase_rows, summarize, token_rows, training_entries
from trl_ext.monitor.words import duration, score, short, visible

STATE_FILE = "trainer_state.json"  # written by transformers
HTML_FILE = "report.html"
_LAST_ENTRIES = 5  # of the log, averaged for a row of `_KEYS`
_KEYS = {
    "KL per token": "kl",
    "entropy": "entropy",
    "tokens per completion": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
}
_SHOWN_CHARS = 160
_MOST_NAMES_CHARS = 1 << 18  # of all names in a log


def read_state(output_dir: str | Path) -> dict[str, Any]:
    """Read trainer_state.json of a run or its newest checkpoint, with the `log_history` of log.jsonl if that exists.

    Raises DataError if trainer_state.json is missing or damaged and there is no log.jsonl.
    """
    folder = Path(output_dir)
    log = read_log(folder)
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    newest_first = sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    for path in [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in newest_first)]:
        if path.is_file():
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                if not all(isinstance(entry, dict) for entry in state["log_history"]):
                    raise ValueError("its log_history is no list of entries")
                return state | {"log_history": log or state["log_history"]}
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                if log:
                    break
                raise DataError(f"{path} is damaged: {error}. Remove it to use an older checkpoint's.") from error
    if log:
        return {"log_history": log}
    raise DataError(
        f"There is no {LOG_FILE} or {STATE_FILE} in {folder} or its checkpoints. Give the --output_dir of a run."
    )


def read_log_history(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the log history of a finished or stopped run; see `read_state`."""
    return read_state(output_dir)["log_history"]


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
    """Read the page's contents other than the log; files that the folder lacks are left out."""
    trainer = {PPO: "PPO", REWARD_MODEL: "Reward model"}.get(summary.kind, "GRPO")
    weights = record.recipe.get("reward_weights") if record else None
    tables = _of_run(folder, COMPLETIONS_FOLDER).parent
    keys = {key.removeprefix("eval_") for entry in log_history for key in entry}
    names = {key.removeprefix("rewards/").removesuffix("/mean") for key in keys if key.startswith("rewards/")}
    if sum(map(len, keys)) > _MOST_NAMES_CHARS:
        raise DataError(f"The log of {folder} has {len(keys):,} names, more than a page can show. Log fewer.")
    samples = read_samples(tables, names, weights)
    if record is None:
        return RunFacts(f"{trainer} run", max_steps=max_steps, samples=samples)
    model, data, versions = record.model, record.dataset, record.versions
    number = versions.get("num_processes") or 1
    processes = "" if len(versions.get("cards") or ()) == number else f"{number} process{'es' if number != 1 else ''}"
    machine = ", ".join(filter(None, (processes, record.cards)))
    try:
        started = f"{datetime.fromisoformat(str(versions.get('started'))):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        started = ""
    facts = [f"data: {short_name(data)}" if data else "", started, machine]
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


# Several runs in one table: their last numbers, and the settings and versions that differ ---------------------------


def compare_runs(folders: Sequence[str | Path]) -> list[list[str]]:
    """Return a table: a header with the runs' names, a row for each number, and a row for each setting that differs.

    Raises ConfigError for fewer than two runs, DataError if a folder holds no run or an incomplete run.
    """
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        given = " ".join(map(str, folders))
        raise ConfigError(f"There is nothing to compare in: {given}. Give the folders of two or more different runs.")
    runs = [(_numbers(read_log_history(folder)), _settings(read_record(folder))) for folder in folders]
    numbers, settings = (_rows([run[part] for run in runs]) for part in (0, 1))
    differing = [row for row in settings if len(set(row[1:])) > 1]
    return [["", *short_names([Path(folder) for folder in folders])], *numbers, *differing]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths below the folder that holds all of them."""
    shared = os.path.commonpath([folder.resolve().parent for folder in folders])
    return [str(folder.resolve().relative_to(shared)) for folder in folders]


def _rows(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row for each name, with "-" for a run without it."""
    names = dict.fromkeys(chain.from_iterable(runs))
    return [[visible(name), *(visible(run.get(name, "-")) for run in runs)] for name in names]


def _numbers(log_history: Sequence[log_keys.Entry]) -> dict[str, str]:
    """Return the run's last numbers, by name."""
    summary, training = summarize(log_history), training_entries(log_history)
    found: dict[str, str] = {}
    for where, changes in (("last steps", summary.training), ("held-out", summary.held_out)):
        found |= {f"{curve.name}, {where}": score(change.after) for curve, change in changes.items()}
    for name, key in _KEYS.items():
        found |= _mean(name, [log_keys.number(entry, key) for entry in training])
    found |= _mean("seconds per step", [log_keys.step_s(entry) for entry in training])
    found["steps"] = f"{summary.num_steps:,}"
    if summary.train_s is not None:
        found["training time"] = duration(summary.train_s)
    if summary.forwarded_tokens is not None:
        found["tokens forwarded"] = f"{summary.forwarded_tokens:,}"
    if summary.memory:
        found["memory at the peak, GiB"] = f"{max(float(row[2]) for row in summary.memory[1:]):.1f}"
    return found


def _mean(name: str, values: Sequence[float | None]) -> dict[str, str]:
    last = [value for value in values if value is not None][-_LAST_ENTRIES:]
    return {f"{name}, last steps": short(fmean(last))} if last else {}


def _settings(record: RunRecord | None) -> dict[str, str]:
    """Return the recipe's keys, rules, machine and versions of packages as text; empty without a record."""
    if record is None:
        return {}
    rules: Mapping[str, Any] = record.rules or {}
    settings = {name: value for name, value in record.recipe.items() if name not in ("rules", "output_dir")}
    for rule in rules.get("rules", ()):
        settings[f"rule {rule.get('name', rule.get('rule'))}"] = ", ".join(
            f"{key} {_in_words(value)}" for key, value in rule.items() if key != "name"
        )
    settings |= {f"rules: {name}": value for name, value in rules.items() if name != "rules"}
    settings |= {
        name: record.versions[name] for name in ("trainer", "num_processes", "cards") if name in record.versions
    }
    return {name: _in_words(value) for name, value in (settings | record.versions.get("packages", {})).items()}


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# The last lines of a run: one problem before and after training, and the next commands ------------------------------


def ending(folder: str | Path, kind: str) -> list[str]:
    """Return the lines; `kind` is "grpo", "ppo" or "reward"."""
    lines = []
    if found := same_problem(Path(folder)):
        names = ("One problem", "Before", "After")
        for name, text in zip(names, found, strict=True):  # in one line without control characters
            line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
            half = _SHOWN_CHARS // 2
            cut = line if len(line) <= _SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}"
            lines.append(f"{name + ':':13}{cut}")
        lines.append("")
    commands = [(f"trl-ext report {folder}", "the report again, and a comparison with another run by --compare")]
    if kind != "reward":
        commands.append((f"trl-ext evaluate {folder}", "held-out problems, greedily or with pass@k"))
    commands.append(("trl-ext recipes", "recipes by task and card"))
    width = max(len(command) for command, _ in commands)
    return [*lines, "Next:", *(f"  {command:{width}}  {purpose}" for command, purpose in commands)]


def same_problem(folder: Path) -> tuple[str, str, str] | None:
    """Return a prompt that is in a run's first and last table of completions, and its answer in each.

    Returns None if no prompt is in both, or the run wrote no tables (`log_completions`). The tables are of evaluations
    if the run began and ended with an evaluation.
    """
    import pyarrow.parquet as parquet

    paths = sorted((folder / "completions").glob("completions_*.parquet"), key=lambda path: (len(path.name), path))
    if len(paths) < 2:
        return None
    try:
        ends = [
            parquet.read_table(path, columns=["prompt", "completion"]).to_pylist() for path in (paths[0], paths[-1])
        ]
    except (OSError, ValueError):  # pyarrow's errors, for a table that a full disk truncated
        return None
    first, last = (
        {_last_content(row["prompt"]): _last_content(row["completion"]) for row in reversed(table)} for table in ends
    )
    prompt = next((prompt for prompt in reversed(first) if prompt in last), None)
    return None if prompt is None else (prompt, first[prompt], last[prompt])


def _last_content(value: Any) -> str:
    """Return the content of the last message, or the text itself."""
    content = value[-1].get("content") if isinstance(value, list) and value else value
    return "" if content is None else str(content)

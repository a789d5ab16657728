"""Runs the rows of a benchmark for cards, each in a process of its own, and keeps how every row ended.

A row that is in the file already is not run again, so that the same command goes on where the last one stopped: on a
machine that is lent for minutes. How a row can end:

    measured    it has figures
    oom         it ran out of memory; `reason` says where
    unfinished  it took longer than a row may
    skipped     this machine cannot run it; tried again where it can
    failed      it broke; tried again
    left        the minutes were over before it began or ended; tried again
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.gpu.beside import card_name, card_note
from benchmarks.gpu.card import card_facts, has_card
from benchmarks.machine import machine, write
from tests.twin.driver import last_words
from trl_ext.memory import Job
from trl_ext.memory.files.settings import ALLOCATOR

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Where a lent machine keeps what is brought home.
OUT = Path(os.environ.get("OUT", RESULTS))
PREFIX = "ROW "  # before a worker's answer: libraries print, too
STATUSES = ("measured", "oom", "unfinished", "skipped", "failed", "left")
FINAL = ("measured", "oom", "unfinished")
MINUTES = 8.5
MOST_ALIKE = 3  # rows that fail for one reason, numbers aside, end their part
MEASURED = "measured on a CUDA card"
# What must be the same for rows of two calls to stand in one file.
BIRTH = ("card", "torch", "transformers", "trl")
NO_CARD = "There is no CUDA card here. Run this on one, or try the benchmark itself: --device cpu --scale tiny."


class Named(Protocol):
    """A row."""

    @property
    def name(self) -> str: ...


Record = dict[str, Any]


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks for cards have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="name the rows, and end")
    made.add_argument("--rows", nargs="+", default=[], help="only rows of these names, or whose name holds one")
    made.add_argument("--minutes", type=float, default=MINUTES, help="end after so many minutes")
    made.add_argument("--row_minutes", type=float, help="end a row after so many minutes")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the benchmark itself")
    made.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny: models of a toy's width")
    made.add_argument("--output", type=Path, default=OUT / f"{name}.json", help="its rows are kept, others added")
    return made


def chosen(rows: Sequence[Any], patterns: Sequence[str]) -> list[Any]:
    """Rows whose name holds one of the patterns; where one is a row's whole name, it means that row alone."""
    names = {row.name for row in rows}

    def matches(row: Named, pattern: str) -> bool:
        return row.name == pattern if pattern in names else pattern in row.name

    return [row for row in rows if not patterns or any(matches(row, pattern) for pattern in patterns)]


def ask(command: Sequence[str], limit_s: float, variables: Mapping[str, str] | None = None) -> Record:
    """The answer of a row's process: the JSON behind PREFIX in its output.

    Args:
        command: Its arguments; `python` comes first by itself.
        limit_s: Seconds after which it is ended, with all that it started.
        variables: Its environment, this one's if None.
    """
    surroundings = dict(os.environ if variables is None else variables)
    # One card: with two in sight the Trainer would put a copy of the model on each.
    surroundings["CUDA_VISIBLE_DEVICES"] = surroundings.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), surroundings.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=err, env=surroundings, cwd=ROOT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"status": "unfinished", "reason": f"It took more than {limit_s:.0f} s."}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        return read_answer(out.read(), err.read())


def read_answer(output: str, errors: str) -> Record:
    """What a worker printed behind PREFIX; that it failed, with its last words, if there is nothing."""
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if lines:
        return json.loads(lines[-1].removeprefix(PREFIX))
    return {"status": "failed", "reason": f"{last_words(errors)}."}


def checked(found: Record, packing: bool) -> Record:
    """A row's record; failed, if it ran packed and its job does not, or the other way round."""
    if found["status"] == "measured" and found["packed"] != packing:
        ran = "packed" if found["packed"] else "padded"
        return {"status": "failed", "reason": f"Its rows were {ran}, which is not what its job asks."}
    return found


def allocator(job: Job) -> dict[str, str]:
    """Variables of a worker whose segments expand, or do not, as the planner counts for this job."""
    return {name: f"expandable_segments:{job.expandable_segments}" for name in ALLOCATOR}


def answer(figures: Mapping[str, Any]) -> None:
    """Print a worker's answer."""
    print(PREFIX + json.dumps(figures), flush=True)


class Run:
    """A call of a benchmark.

    Args:
        name: "gpu_speed".
        rows: All that are wanted, in the order of their worth.
        options: Of `parser`.
        run_row: Measures a row within so many seconds; returns `status` and figures.
        row_limit_s: Seconds that a row may take, unless told otherwise.
        summary: Of all records.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Named],
        options: argparse.Namespace,
        run_row: Callable[[Any, float], Record],
        row_limit_s: float,
        summary: Callable[[Sequence[Record]], Mapping[str, Any]],
    ):
        self._name, self._rows, self._options, self._run_row = name, rows, options, run_row
        self._row_limit_s = 60 * options.row_minutes if options.row_minutes else row_limit_s
        self._summary = summary
        self._until_s, self._longest_s = time.monotonic() + 60 * options.minutes, 0.0
        self._lock, self._failures = threading.Lock(), Counter[str]()
        self._birth = machine() | card_facts(options.device)
        self.records = {one["row"]: one for one in self._kept()}

    def _kept(self) -> list[Record]:
        """Rows of earlier calls: of the output, else of the results in this checkout where they are this machine's."""
        output = self._options.output
        path = output if output.is_file() else RESULTS / output.name
        if not path.is_file():
            return []
        found = json.loads(path.read_text(encoding="utf-8"))
        here = {"scale": self._options.scale, **{key: self._birth[key] for key in BIRTH}}
        there = {"scale": found["scale"], **{key: found["machine"][key] for key in BIRTH}}
        if here != there and path != output:
            return []
        if here != there:
            other = ", ".join(f"{key} {there[key]} and not {here[key]}" for key in here if here[key] != there[key])
            raise SystemExit(f"The rows of {path} are of {other}. Name another file with --output, or move this one.")
        return found["rows"]

    def waiting(self) -> list[Any]:
        """Rows that have not ended yet."""
        return [row for row in self._rows if self.records.get(row.name, {}).get("status") not in FINAL]

    def measure(self, console: Console) -> Record:
        """Run every row that has not ended yet, one by one, as long as the minutes last; each is written at once."""
        for row in self.waiting():
            self.one(row, console)
        return self.save()

    def one(self, row: Named, console: Console, is_shared: Callable[[], bool] = lambda: False) -> None:
        """Run a row and write how it ended; by several threads at a time, if they like.

        Args:
            row: One of `waiting`.
            is_shared: Says at its end whether others were on the card meanwhile. Then its seconds are not kept, and
                that it ran out of memory says nothing.
        """
        begun_s = time.monotonic()
        left_s = self._until_s - begun_s
        over = f"The {self._options.minutes:g} minutes were over."
        if repeated := next((reason for reason, num in self._failures.items() if num >= MOST_ALIKE), ""):
            found = {"status": "left", "reason": f"{MOST_ALIKE} rows failed for one reason: {repeated}"}
        elif left_s <= self._longest_s:
            found = {"status": "left", "reason": over}
        else:
            found = self._run_row(row, min(left_s, self._row_limit_s))
            self._longest_s = max(self._longest_s, time.monotonic() - begun_s)
            if found["status"] == "unfinished" and left_s < self._row_limit_s:
                found = {"status": "left", "reason": over}
        if is_shared():
            found = without_seconds(found)
            if found["status"] == "oom":
                found = {"status": "left", "reason": "It ran out of memory beside others, which says nothing."}
        with self._lock:
            if found["status"] == "failed":
                self._failures[re.sub(r"\d+", "0", found.get("reason", ""))] += 1
            self.records[row.name] = {"row": row.name, **found}
            console.print(f"{row.name}: {found['status']} {found.get('reason', '')}", soft_wrap=True, highlight=False)
            self.save()

    def save(self) -> Record:
        """Write what is known so far."""
        records = list(self.records.values())
        result = {
            "benchmark": self._name,
            "basis": MEASURED if self._options.device == "cuda" else "a processor: it runs, no more",
            "scale": self._options.scale,
            "machine": self._birth,
            "rows": records,
            "summary": {**counts(records), **self._summary(records)},
        }
        write(self._options.output, result)
        return result


def without_seconds(found: Record) -> Record:
    """A record without what was timed, bytes kept."""
    kept = {key: value for key, value in found.items() if key not in ("seconds", "step_phases")}
    if "measured" in kept:
        errors = {name: error for name, error in kept["error_pct"].items() if not name.endswith("_s")}
        kept |= {"measured": {**kept["measured"], "seconds": {}}, "error_pct": errors}
    return kept


def counts(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many rows ended how."""
    return {"rows": len(records)} | {key: sum(one["status"] == key for one in records) for key in STATUSES}


def begin(options: argparse.Namespace, rows: Sequence[Named], console: Console) -> int | None:
    """The exit code where there is nothing to measure: a list was asked for, no row has this name, no card is here."""
    if not rows:
        console.print(f"No row's name holds {' or '.join(options.rows)}. --list names them.")
        return 2
    if options.list:
        console.print(*(row.name for row in rows), sep="\n", soft_wrap=True, highlight=False)
        return 0
    if options.device == "cuda" and not has_card():
        console.print(NO_CARD)
        return 2
    if note := card_note(card_name()):
        console.print(note, soft_wrap=True, highlight=False)
    return None


def say_what_is_left(result: Mapping[str, Any], console: Console) -> None:
    """Which rows the next call begins with."""
    left = [one["row"] for one in result["rows"] if one["status"] in ("left", "failed")]
    if left:
        console.print(f"{len(left)} rows are left: {', '.join(left)}. The same command goes on.", soft_wrap=True)

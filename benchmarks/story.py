"""One recipe, mended four times by what the report says: five runs of the quickstart's task from poor settings.

Each run changes the key that the first sentence of the last verdict names. Two processes, as `make quickstart`:

    python benchmarks/story.py --output benchmarks/results/story_cpu.json

`docs/running/story.md` tells it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import save
from trl_ext.monitor.log_keys import read_series
from trl_ext.monitor.pages.verdict import judge_run
from trl_ext.monitor.record import read_record, read_state
from trl_ext.monitor.summary import summarize

ANSWER = "eval_rewards/answer/mean"  # share of held-out answers that are right


# Long answers pay more than right ones; then right answers pay, and short ones a little.
LONG_PAYS = [
    {"rule": "answer", "gold": "answer", "kind": "number", "weight": 0.2},
    {"rule": "length", "low": 16, "slack": 16},
]
ANSWERS_PAY = [
    {"rule": "answer", "gold": "answer", "kind": "number"},
    {"rule": "length", "high": 10, "slack": 10, "weight": 0.1},
]


@dataclass(frozen=True)
class Attempt:
    """A run of the story.

    Args:
        name: Of its folder, and of its bar in the picture.
        changes: Keys of the recipe that it changes; all later runs keep them.
        leads_to: The first words of the verdict's sentence that the next run follows; for the last run, its headline.
    """

    name: str
    changes: Mapping[str, Any]
    leads_to: str


STORY = (
    Attempt(
        "poor settings",
        {"max_completion_length": 4, "learning_rate": 1e-3, "num_generations": 2, "rules": LONG_PAYS},
        "Entropy fell",
    ),
    Attempt("lower rate", {"learning_rate": 4e-5}, "of the last completions were cut off"),
    Attempt("more tokens", {"max_completion_length": 16}, "of the last completions were cut off"),
    Attempt("answers pay", {"rules": ANSWERS_PAY}, "of the last groups all completions earned the same"),
    Attempt("larger groups", {"num_generations": 8}, "It learned"),
)


def train(recipe: Mapping[str, Any], folder: Path, assets: Path, given: Sequence[str]) -> dict[str, Any]:
    """Run a recipe as a user does, unless `folder` has the run, and return its seconds, held-out answers and verdict.

    Args:
        given: Words of the command, after those that the quickstart gives.
    """
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
    words = ["grpo", "--num_processes", "2", "--config_file", "zero2", "--config", str(path)]
    words += ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    words += ["--output_dir", str(folder), "--overwrite", "true", *given]
    if not (folder / "report.html").is_file():
        subprocess.run([Path(sys.executable).with_name("trl-ext"), *words], check=True, stdout=sys.stderr)
    elif given:
        raise SystemExit(f"{folder} has a run, which {' '.join(given)} would not change. Give another --folder.")
    log, record = read_state(folder)["log_history"], read_record(folder)
    summary = summarize(log)
    assert record is not None and summary.train_s is not None, "The run has ended."
    verdict = judge_run(log, read_series(log), summary, recipe["max_steps"], record.measures)
    held_out = [entry[ANSWER] for entry in log if ANSWER in entry]
    return {
        "seconds": round(summary.train_s, 1),
        "held_out_before": round(held_out[0], 4),
        "held_out_after": round(held_out[-1], 4),
        "headline": verdict.headline,
        "warnings": list(verdict.warnings),
    }


def tell(folder: Path, assets: Path, given: Sequence[str]) -> list[dict[str, Any]]:
    """Run all attempts, each with the changes of those before it."""
    recipe = yaml.safe_load(files("trl_ext").joinpath("recipes/quickstart.yaml").read_text(encoding="utf-8"))
    told = []
    for number, attempt in enumerate(STORY):
        recipe |= attempt.changes
        found = train(recipe, folder / f"{number}", assets, given)
        told.append({"name": attempt.name, "changes": dict(attempt.changes), **found})
        print(f"{attempt.name:14} {found['seconds']:5.0f} s  {found['held_out_before']:.0%} -> ", end="")
        print(f"{found['held_out_after']:.0%}  {found['headline']}", *found["warnings"], sep="\n    ", flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--folder",
        type=Path,
        help="of the five runs: what it has is not run again; else a folder that is deleted at the end",
    )
    options, given = parser.parse_known_args()
    from benchmarks.quickstart.assets import prepare

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        told = tell(folder, prepare(), given)
    seconds = sum(run["seconds"] for run in told)
    save(options.output, "story", given=given, cores=os.cpu_count(), seconds=seconds, runs=told)


if __name__ == "__main__":
    main()

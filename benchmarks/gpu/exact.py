"""Is packing exact on this card? The tests of tests/gpu, a row a file, and what each came to in one JSON file.

make gpu-exact                                      # again and again, until no row is left
python -m benchmarks.gpu.exact --device cpu --scale tiny --rows updates --output out.json
"""

import argparse
import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import runner

ROW_LIMIT_S = 300.0
# Reads by tests/gpu/card.py.
DEVICE_VARIABLE = "TRL_EXT_TEST_DEVICE"
TINY = "llama"  # of the families of models


@dataclass(frozen=True, slots=True)
class Row:
    """The tests of a file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem.removeprefix("test_")


def all_rows() -> list[Row]:
    return [Row(path) for path in sorted((runner.ROOT / "tests" / "gpu").glob("test_*.py"))]


def run_row(row: Row, device: str, scale: str, limit_s: float) -> dict[str, Any]:
    """Run the tests of a file within its seconds.

    Returns:
        `status` "measured" if no test failed, `passed`, and `failed_tests` and `skipped_tests` with their reasons.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        # tests/conftest.py serves the other tests, by packages that a machine with a card would have to be given.
        command = ["-m", "pytest", str(row.path), "-q", "-p", "no:cacheprovider", "--noconftest"]
        command += [f"--junitxml={report}"]
        command += ["-k", TINY] if scale == "tiny" else []
        found = runner.ask(command, limit_s, os.environ | {DEVICE_VARIABLE: device})
        return results(report) if report.is_file() else found


def results(report: Path) -> dict[str, Any]:
    """What pytest wrote, in short."""
    # Written by pytest a moment ago, so no stranger's XML.
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {_name(case): _reason(case, "failure", "error") for case in cases if _has(case, "failure", "error")}
    skipped = {_name(case): _reason(case, "skipped") for case in cases if _has(case, "skipped")}
    ended = {"status": "failed", "reason": f"{len(failed)} tests failed."} if failed else {"status": "measured"}
    return {
        **ended,
        "passed": len(cases) - len(failed) - len(skipped),
        "failed_tests": failed,
        "skipped_tests": skipped,
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
    }


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "")


def _reason(case: ElementTree.Element, *kinds: str) -> str:
    """The first line of what pytest says."""
    message = next(found.get("message", "") for kind in kinds if (found := case.find(kind)) is not None)
    return message.strip().split("\n")[0]


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, over all files."""
    done = [one for one in records if "passed" in one]
    return {
        "tests_passed": sum(one["passed"] for one in done),
        "tests_failed": sum(len(one["failed_tests"]) for one in done),
        "tests_skipped": sum(len(one["skipped_tests"]) for one in done),
    }


def main() -> int:
    options = runner.parser("gpu_exact", __doc__).parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    rows = runner.chosen(all_rows(), options.rows)
    if (code := runner.begin(options, rows, console)) is not None:
        return code
    return report(make_run(rows, options).measure(console), console)


def make_run(rows: Sequence[Row], options: argparse.Namespace) -> runner.Run:
    def measure(row: Row, limit_s: float) -> runner.Record:
        return run_row(row, options.device, options.scale, limit_s)

    return runner.Run("gpu_exact", rows, options, measure, ROW_LIMIT_S, summary)


def report(result: Mapping[str, Any], console: Console) -> int:
    """Say what came out; the exit code."""
    for one in result["rows"]:
        for name, reason in one.get("failed_tests", {}).items():
            console.print(f"{one['row']}: {name}: {reason}", soft_wrap=True, highlight=False, markup=False)
    total = result["summary"]
    console.print(*(f"{total[f'tests_{kind}']} {kind}" for kind in ("passed", "failed", "skipped")), sep=", ")
    runner.say_what_is_left(result, console)
    return 1 if total["tests_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""A part of the benchmarks for cards whose rows are names: the part's own module measures them, each in a process."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from rich.console import Console

from benchmarks.gpu import runner

WORK = "--work"  # in the command of a row's process
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRL_EXPERIMENTAL_SILENCE"), "1")
ROW_LIMIT_S = 120.0


def main(part: str, doc: str | None, names: Sequence[str], work: Callable[..., runner.Record]) -> int:
    """The command of `benchmarks.gpu.PART`.

    Args:
        part, doc: Its name, and its help.
        names: Of the rows, in the order of their worth.
        work: Measures the row of a name on a device at a scale; returns figures, and in `says` what they come to, or
            `status` "skipped" and a `reason`.
    """
    if sys.argv[1:2] == [WORK]:
        # Here, so that the preflight can name a library that is missing.
        from datasets import disable_progress_bars

        from benchmarks.gpu.memory_worker import is_out_of_memory

        warnings.filterwarnings("ignore")
        disable_progress_bars()
        try:
            runner.answer({"status": "measured", **work(*sys.argv[2:])})
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            runner.answer({"status": "oom", "reason": str(error).strip().splitlines()[0]})
        return 0
    options, console = (
        runner.parser(f"gpu_{part}", doc).parse_args(),
        Console(width=150, highlight=False, markup=False),
    )
    rows = runner.chosen([SimpleNamespace(name=name) for name in names], options.rows)
    if (code := runner.begin(options, rows, console)) is not None:
        return code

    def measured(row: runner.Named, limit_s: float) -> runner.Record:
        found = ask(part, row.name, options.device, options.scale, limit_s)
        console.print(found.get("says", ""), soft_wrap=True)
        return found

    run = runner.Run(f"gpu_{part}", rows, options, measured, ROW_LIMIT_S, lambda records: {})
    runner.say_what_is_left(run.measure(console), console)
    return 0


def ask(part: str, name: str, device: str, scale: str, limit_s: float) -> runner.Record:
    """What the process of a row answers within its seconds."""
    command = ["-m", f"benchmarks.gpu.{part}", WORK, name, device, scale]
    return runner.ask(command, limit_s, os.environ | QUIET)

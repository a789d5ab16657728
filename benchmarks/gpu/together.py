"""Exactness and memory side by side: as many rows at once as the card's memory and the cores take.

Bytes and tests do not mind who else is on the card; seconds do, and are not kept of rows that were not alone. A row
takes the planner's prediction of the card; one that is larger than the room runs alone.

    python -m benchmarks.gpu.together                   # again and again, until no row is left
    python -m benchmarks.gpu.together --rows varlen /zero3/ --most 8
"""

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.gpu import exact, memory, memory_rows, runner
from benchmarks.gpu.card import card_bytes
from benchmarks.gpu.memory_report import predict
from trl_ext.memory.units import gib

# Of the card, since predictions are no promises. Of a row beyond its prediction: the CUDA context and the allocator.
ROOM_FRAC, MORE_FRAC, CONTEXT_GIB = 0.91, 1.12, 1.5
EXACT_GIB = 3.0


@dataclass
class Task:
    """A row of a part's run that waits or runs, what it takes of the card, and whether another ran beside it."""

    run: runner.Run
    row: Any
    gib: float
    was_shared: bool = False


def side_by_side(tasks: Sequence[Task], room_gib: float, most: int, console: Console) -> None:
    """Run all tasks, the first that there is room for first; one that is larger than the room, alone."""
    waiting, running = list(tasks), dict[threading.Thread, Task]()
    while waiting or running:
        running = {thread: task for thread, task in running.items() if thread.is_alive()}
        for task in list(waiting):
            used = sum(other.gib for other in running.values())
            if running and (len(running) >= most or used + task.gib > room_gib):
                continue
            waiting.remove(task)
            for other in running.values():
                task.was_shared = other.was_shared = True
            # The loop's `task` is another one when this is asked.
            words = (task.row, console, lambda task=task: task.was_shared)
            thread = threading.Thread(target=task.run.one, args=words)
            thread.start()
            running[thread] = task
        time.sleep(0.05)


def main() -> int:
    parser = runner.parser("gpu_together", __doc__)
    parser.add_argument("--most", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="rows at once")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=170)
    rows = runner.chosen([*exact.all_rows(), *memory_rows.ROWS], options.rows)
    if (code := runner.begin(options, rows, console)) is not None:
        return code
    tests = [row for row in rows if isinstance(row, exact.Row)]
    others = [row for row in rows if not isinstance(row, exact.Row)]
    others = [memory_rows.tiny(row) for row in others] if options.scale == "tiny" else others
    of_tests = exact.make_run(tests, of_part(options, "gpu_exact"))
    of_bytes = memory.make_run(others, of_part(options, "gpu_memory"))
    tasks = [Task(of_tests, row, EXACT_GIB) for row in of_tests.waiting()]
    needs = {row.name: MORE_FRAC * gib(predict(row)["reserved"]) + CONTEXT_GIB for row in others}
    tasks += [Task(of_bytes, row, needs[row.name]) for row in of_bytes.waiting()]
    device_bytes = card_bytes(options.device)
    side_by_side(tasks, ROOM_FRAC * gib(device_bytes) if device_bytes else math.inf, options.most, console)
    memory.report(of_bytes.save(), console)
    return exact.report(of_tests.save(), console)


def of_part(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Options of a part, whose file stands where --output names a file."""
    return argparse.Namespace(**vars(options) | {"output": options.output.with_name(f"{name}.json")})


if __name__ == "__main__":
    sys.exit(main())

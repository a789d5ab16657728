"""What does planning cost? Processor seconds per million tokens of cutting padding off, planning rows and layout.

One optimizer step of long completions, as 64 and 512 padded rows. The least of `--rounds` counts: another process on
the machine can only add to it. One thread.

    python benchmarks/planning.py --output benchmarks/results/planning_cpu.json
"""

import argparse
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from machine import save
from rich.console import Console
from rich.table import Table

from trl_ext.packing.layout import lay_out
from trl_ext.trainers.step.unpadded import plan, unpad

ASKED_S = 0.07
PARTS = ("unpad", "plan", "lay_out")


@dataclass(frozen=True, slots=True)
class Shape:
    """Completions of `shortest` to `longest` tokens in groups of 8; `budget` tokens a forward (None: one forward)."""

    rows: int
    prompt: int
    shortest: int
    longest: int
    budget: int | None
    group: int = 8


SHAPES = (
    Shape(64, 1024, 2048, 8192, None),
    Shape(64, 1024, 2048, 8192, 32768),
    Shape(512, 1024, 4096, 16384, 32768),
)
TINY = (Shape(16, 8, 4, 16, 64),)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one step: `tokens` without padding, as many as a padded row has ones in its mask.

    Args:
        seconds: Of processor time, by part.
        seconds_per_million: Of all parts, per million tokens.
    """

    shape: Shape
    tokens: int
    forwards: int
    seconds: dict[str, float]
    seconds_per_million: float
    asked: float = ASKED_S


def batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids and mask [B, P + C], and C."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(shape.shortest, shape.longest + 1, (shape.rows,), generator=draw)
    width = int(lengths.max())
    prompts = torch.randint(1000, 150_000, (shape.rows // shape.group, shape.prompt), generator=draw)
    mask = (torch.arange(width) < lengths[:, None]).long()
    completions = torch.randint(1000, 150_000, mask.shape, generator=draw) * mask
    ids = torch.cat([prompts.repeat_interleave(shape.group, 0), completions], dim=1)
    return ids, torch.cat([torch.ones(shape.rows, shape.prompt, dtype=torch.long), mask], dim=1), width


def once(shape: Shape, ids: torch.Tensor, mask: torch.Tensor, width: int) -> tuple[list[float], int]:
    """Processor seconds of the parts, and the number of forwards."""
    readings = [time.process_time()]
    raw = unpad(ids, mask, width)
    readings.append(time.process_time())
    rows = plan(raw, True, shape.budget)
    readings.append(time.process_time())
    for row in rows:
        lay_out(row, raw.sequences, raw.num_scored, torch.device("cpu"))
    readings.append(time.process_time())
    return [after - before for before, after in pairwise(readings)], len(rows)


def measure(shape: Shape, rounds: int) -> Result:
    ids, mask, width = batch(shape)
    found = [once(shape, ids, mask, width) for _ in range(rounds)]
    seconds, forwards = min(found, key=lambda one: sum(one[0]))
    tokens = int(mask.sum())
    by_part = {part: round(value, 4) for part, value in zip(PARTS, seconds, strict=True)}
    return Result(shape, tokens, forwards, by_part, round(sum(seconds) / tokens * 1e6, 4))


def show(results: list[Result]) -> None:
    table = Table(title="Processor seconds of planning a step")
    for column in ("rows", "tokens", "forwards", *PARTS, "s per million", "asked"):
        table.add_column(column, justify="right")
    for r in results:
        values = (r.shape.rows, r.tokens, r.forwards, *r.seconds.values(), r.seconds_per_million, r.asked)
        table.add_row(*map(str, values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times to plan each step; the least counts")
    parser.add_argument("--tiny", action="store_true", help="see that everything runs")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for shape in TINY if options.tiny else SHAPES:
        results.append(measure(shape, options.rounds))
        show(results)
        save(options.output, "planning", results=[asdict(r) for r in results])


if __name__ == "__main__":
    main()

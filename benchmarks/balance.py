"""How evenly is a step spread? Cost of the slowest of 8 ranks over the mean, by the planner's own cost of a forward.

Lengths are log-normal, drawn anew for every step; nothing is run, so that it takes seconds on any machine. Beside it
what the same ranks do without a plan: each the rows that it generated.

    python benchmarks/balance.py --output benchmarks/results/balance.json
"""

import argparse
import itertools
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_task import Shape, lengths
from machine import save
from rich.console import Console
from rich.table import Table

from trl_ext.packing.step_plan import RowSize, forward_cost, plan_step

NUM_RANKS = 8
HIDDEN_SIZE = 4096
MAX_TOKENS = 32768
ASKED = 1.05
SIGMAS = (0.4, 0.8, 1.2)
GROUPS = (8, 16, 64)


@dataclass(frozen=True, slots=True)
class Result:
    """Slowest over mean rank: median and worst of the steps, and the median without a plan.

    Args:
        sigma: Of the lengths.
        groups: Of a step, over all ranks; 8 completions each.
        over_tokens: Tokens that are forwarded over those if no group were cut: its prompt stands twice.
    """

    sigma: float
    groups: int
    median: float
    worst: float
    unplanned: float
    over_tokens: float
    asked: float = ASKED


def rows_of(shape: Shape, seed: int) -> list[RowSize]:
    """The rows of a step, group mates side by side."""
    return [RowSize(i // shape.generations, shape.prompt, n) for i, n in enumerate(lengths(shape, seed))]


def unplanned(rows: list[RowSize]) -> float:
    """Slowest over mean where each rank keeps the rows that it generated."""
    share = len(rows) // NUM_RANKS
    costs = []
    for start in range(0, len(rows), share):
        mine = rows[start : start + share]
        groups = [list(group) for _, group in itertools.groupby(mine, key=lambda row: row.group)]
        costs.append(sum(forward_cost(group, HIDDEN_SIZE) for group in groups))
    return max(costs) / statistics.mean(costs)


def measure(sigma: float, groups: int, steps: int) -> Result:
    shape = Shape("", prompt=512, mean=1024, longest=8192, sigma=sigma, groups=groups)
    found, plain, over = [], [], []
    for seed in range(steps):
        rows = rows_of(shape, seed)
        plan = plan_step(rows, NUM_RANKS, MAX_TOKENS, HIDDEN_SIZE)
        found.append(plan.imbalance)
        plain.append(unplanned(rows))
        over.append(_forwarded(plan.forwards, rows) / (groups * shape.prompt + sum(row.own for row in rows)))
    return Result(
        sigma,
        groups,
        median=round(statistics.median(found), 4),
        worst=round(max(found), 4),
        unplanned=round(statistics.median(plain), 4),
        over_tokens=round(statistics.mean(over), 4),
    )


def _forwarded(ranks, rows: list[RowSize]) -> int:
    """Tokens of all forwards: a group's prompt stands once in each that holds one of its rows."""
    own = sum(row.own for row in rows)
    forwards = [forward for forwards in ranks for forward in forwards]
    return own + sum(sum({rows[i].group: rows[i].shared for i in forward}.values()) for forward in forwards)


def show(results: list[Result]) -> None:
    table = Table(title=f"Slowest over mean of {NUM_RANKS} ranks")
    for column in ("sigma", "groups", "median", "worst", "asked", "without a plan", "tokens"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(*map(str, (r.sigma, r.groups, r.median, r.worst, r.asked, r.unplanned, r.over_tokens)))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps drawn for each sigma and number of groups")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    results = [measure(sigma, groups, options.steps) for sigma in SIGMAS for groups in GROUPS]
    show(results)
    where = {"ranks": NUM_RANKS, "hidden_size": HIDDEN_SIZE, "max_tokens_per_forward": MAX_TOKENS}
    save(options.output, "balance", **where, steps=options.steps, results=[asdict(r) for r in results])


if __name__ == "__main__":
    main()

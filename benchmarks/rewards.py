"""How fast are rules? Rows per second on this machine, each against the aim that it was built for.

Rules that run in the caller are measured by processor time, those in workers on the wall.

python benchmarks/rewards.py --output benchmarks/results/rewards_cpu.json
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine, write
from rich.console import Console
from rich.table import Table

from trl_ext.rewards import Keywords, Length, Limits, Math, Pattern, Repetition, Row, Rule, RuleSet, Tags, Verdict

WORDS = "the model adds both numbers and then checks whether sum is right so answer follows from it".split()


@dataclass(frozen=True)
class Result:
    """One measure: what was found, and the aim, which is a least or a most."""

    name: str
    value: float
    unit: str
    aim: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.value <= self.aim if self.at_most else self.value >= self.aim


@dataclass(frozen=True, kw_only=True)
class Nothing(Rule):
    """1.0, at once: what is left is the set's own time."""

    tier = "inline"

    def score(self, row: Row) -> Verdict:
        return Verdict(1.0)


@dataclass(frozen=True, kw_only=True)
class SometimesHangs(Rule):
    """The number of words; hangs where the text says so."""

    def score(self, row: Row) -> Verdict:
        while row.text == "spin":
            pass
        return Verdict(float(len(row.text.split())))


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Processor seconds of this process: the middle of several runs, the first of which does not count."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def text(length: int, draw: random.Random) -> str:
    """A chain of thought and an answer, `length` characters long."""
    body = ""
    while len(body) < length:
        body += draw.choice(WORDS) + " "
    return f"<think>{body[: length - 40]}</think><answer>{draw.randrange(1000)}</answer>"


def inline_rules() -> Result:
    """Five rules of form on completions of 2,000 characters."""
    draw = random.Random(0)
    rules = RuleSet(
        [
            Tags("think", "answer", weight=0.2),
            Length(high=2500, unit="chars", weight=0.1),
            Keywords(required=("sum",), weight=0.1),
            Repetition(weight=0.1),
            Pattern(r"(?s).*</answer>", weight=0.1),
        ]
    )
    completions = [text(2000, draw) for _ in range(2000)]
    ids = [[draw.randrange(50_000) for _ in range(500)] for _ in completions]  # TRL passes them on, too
    seconds = median_seconds(lambda: rules(completions=completions, completion_ids=ids))
    return Result("five inline rules together, 2,000 characters", len(completions) / seconds, "rows/s", 20_000)


def overhead() -> Result:
    """A RuleSet's call against the bare function's, a row."""
    completions = ["A: 18"] * 20_000
    rules = RuleSet([Nothing()])
    with_set = median_seconds(lambda: rules(completions=completions))
    bare = median_seconds(lambda: [1.0 for _ in completions])
    return Result("RuleSet over the bare function", 1e6 * (with_set - bare) / len(completions), "µs/row", 50, True)


def mathematics(is_cold: bool) -> Result:
    """64 problems, 8 completions each, one worker: a core. Cold: no answer occurs twice. Seconds on the wall."""
    draw = random.Random(1)
    rules = RuleSet([Math(gold="answer")], limits=Limits(workers=1))
    rules(completions=["\\boxed{1}"], answer=["2"])  # starts the worker, and its libraries
    rates = []
    for _ in range(3):
        problems = [draw.randrange(10**6) for _ in range(64)]
        golds = [f"\\frac{{{n}}}{{7}}" for n in problems for _ in range(8)]
        # In a group half the answers are the right one, and the wrong ones repeat.
        wrong = [range(8) if is_cold else (0, 0, 0, 0, 1, 1, 2, 3)] * 64
        completions = [f"so \\boxed{{{n + k}/7}}" for n, ks in zip(problems, wrong, strict=True) for k in ks]
        start = time.perf_counter()
        rules(completions=completions, answer=golds)
        rates.append(len(completions) / (time.perf_counter() - start))
    name = "maths, cold" if is_cold else "maths, groups that repeat answers"
    return Result(name, statistics.median(rates), "rows/s/core", 300 if is_cold else 1000)


def pathological() -> Result:
    """512 rows, one in ten of which hangs: the time over (hanging rows x limit / workers)."""
    limits = Limits(cpu_s=0.5, batch_s=120)
    rules = RuleSet([SometimesHangs()], limits=limits)
    rules(completions=["warm up"])
    completions = ["spin" if i % 10 == 0 else "a " * i for i in range(512)]
    start = time.perf_counter()
    found = rules(completions=completions)
    seconds = time.perf_counter() - start
    expected = [0.0 if i % 10 == 0 else float(i) for i in range(512)]
    assert found == expected, "another row's verdict changed"
    bound = 52 * limits.cpu_s / limits.num_workers
    return Result(
        f"512 rows, 52 hang, {limits.num_workers} worker(s): over the bound", seconds / bound, "x", 1.2, True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    results = [overhead(), inline_rules(), mathematics(is_cold=False), mathematics(is_cold=True), pathological()]
    table = Table(title="Rules")
    for column in ("measure", "found", "aim", ""):
        table.add_column(column, justify="right" if column in ("found", "aim") else "left")
    for r in results:
        sign = "at most" if r.at_most else "at least"
        verdict = "met" if r.is_met else "missed"
        table.add_row(r.name, f"{r.value:,.1f} {r.unit}", f"{sign} {r.aim:,g}", verdict)
    Console().print(table)
    if options.output:
        record = {"benchmark": "rewards", "machine": machine(), "results": [asdict(r) for r in results]}
        write(options.output, record)


if __name__ == "__main__":
    main()

"""`python -m tests.lanes.kills.pairs KIND FOLDER`: resume a trainer with every pair of its settings.

Writes `pairs.json` into the folder as it goes on: what ran, what was refused, and what differed. It starts no run
after `KILLS_MINUTES` minutes, 180 unless given.
"""

import gc
import itertools
import json
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import forks, jobs
from tests.faults.forks import in_fork, prepare
from tests.faults.jobs import OUTPUT_DIR
from tests.lanes.kills import settings
from trl_ext.errors import TrlExtError

FILE = "pairs.json"
LIMIT_S = 60 * float(os.environ.get("KILLS_MINUTES", "180"))
_MANY = 20  # values of a setting that are tried by themselves first
NUM_RESUMED = 2  # a row, from steps that change from row to row
_REFUSALS = (TrlExtError, ValueError, TypeError, OSError, ImportError, NotImplementedError, AssertionError)

Value = tuple[str, Any]


@dataclass
class Found:
    """What came of a trainer's settings.

    Args:
        num_pairs: Of values that run alone.
        covered: Pairs of them that a resumed run had.
        num_runs: Runs that were resumed, at several steps each.
        refused: By settings, as text, the sentence.
        broken: By settings, the end of a run that failed before it was stopped, with no error of `_REFUSALS`.
        different: By settings and step, what the resumed run had otherwise.
        seconds: Of the whole search.
    """

    num_pairs: int = 0
    covered: int = 0
    num_runs: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    different: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def summary(self, kind: str) -> str:
        """Return what was found, in a line."""
        return (
            f"{kind}: {self.covered} of {self.num_pairs} pairs covered, {self.num_runs} runs, {len(self.refused)} "
            f"refused, {len(self.broken)} ended before they were stopped, {len(self.different)} silent differences, "
            f"{self.seconds / 60:.0f} minutes"
        )


def attempt(
    kind: str, row: dict[str, Any], folder: Path, number: int, *, is_built_only: bool = False, **more: Any
) -> dict[str, Any]:
    """Train with the settings of a row, and resume; return "refused", "broken" or "different", by step.

    Args:
        kind: Of trainer.
        row: Values by name.
        folder: A new one; removed afterwards.
        number: Of the row: it chooses the steps.
        is_built_only: Only build the trainer.
        more: Settings of the attempt.
    """

    def work() -> dict[str, Any]:
        try:
            trainer = settings.trainer(kind, row, **more)
        except _REFUSALS as error:
            return {"refused": f"{type(error).__name__}: {error}", "when": "built"}
        except Exception as error:  # a library's, such as TRL's activation_offloading without a card
            return {"broken": f"{type(error).__name__}: {error}", "when": "built"}
        if is_built_only:
            return {"different": {}}
        logs = Path(OUTPUT_DIR, "completions")  # made where the trainer is built
        (folder / "whole" / logs).mkdir(parents=True)
        whole = in_fork(folder / "whole", lambda: forks.run(trainer))
        if whole.result is None:
            return _ended(whole)
        saved = Path(folder, "whole", OUTPUT_DIR).glob("checkpoint-*")
        steps = sorted(step for path in saved if (step := int(path.name.split("-")[1])) < whole.result["steps"])
        different = {}
        for step in _chosen(steps, number):
            own = folder / f"from_{step}"
            (own / logs).mkdir(parents=True)
            for earlier in [one for one in steps if one <= step]:
                name = Path(OUTPUT_DIR, f"checkpoint-{earlier}")
                shutil.copytree(folder / "whole" / name, own / name)
            ending = in_fork(own, lambda: forks.resume(trainer))
            if ending.result is None and ending.error:
                return _ended(ending)
            found = jobs.differences(whole.result, ending.result) if ending.result else [ending.log[-1500:]]
            if found:
                different[str(step)] = found
        return {"different": different, "steps": len(steps)}

    try:
        return in_fork(folder, work, forks.LIMIT_S * 4).well()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended(ending: forks.Ending) -> dict[str, Any]:
    if ending.error:
        return {"refused": ending.error}
    lines = [line for line in ending.log.splitlines() if line.strip()]
    return {"broken": f"exit code {ending.code}: {lines[-1] if lines else ''}"}


def _chosen(steps: list[int], number: int) -> list[int]:
    """Return some of the steps, others in the next row: one of each part of the run."""
    size = -(-len(steps) // NUM_RESUMED) or 1
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [part[number % len(part)] for part in parts]


# Which rows -------------------------------------------------------------------------------------------------------


class Pairs:
    """Pairs of values that no row has had, and rows that have many of them; a value that is None is the job's own.

    Args:
        values: By name, those beside the job's own.
        draw: For names in another order in each row.
    """

    def __init__(self, values: dict[str, list[Any]], draw: random.Random):
        self._values = {name: [None, *others] for name, others in values.items()}
        self._draw = draw
        self._conflicts: list[frozenset[Value]] = []
        pairs = itertools.combinations(self._values, 2)
        self.left = {frozenset(((a, x), (b, y))) for a, b in pairs for x in self._values[a] for y in self._values[b]}
        self.number = len(self.left)

    def row(self) -> dict[str, Any]:
        """Return a row that begins with a pair that is left, without a known conflict."""
        chosen = dict(self._draw.choice(sorted(self.left, key=lambda pair: sorted(map(str, pair)))))
        names = [name for name in self._values if name not in chosen]
        self._draw.shuffle(names)
        for name in names:
            options = [one for one in self._values[name] if not self._conflicts_in(chosen | {name: one})]
            new = {one: sum(frozenset(((name, one), old)) in self.left for old in chosen.items()) for one in options}
            chosen[name] = max(options, key=lambda one: (new[one], one is None)) if options else None
        return chosen

    def cover(self, row: dict[str, Any]) -> int:
        """Take the pairs of a row away; return how many they were."""
        before = len(self.left)
        self.left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        return before - len(self.left)

    def exclude(self, conflict: dict[str, Any]) -> None:
        """Have no more rows with these values; take away the pairs that no row can have therefore."""
        self._conflicts.append(frozenset(conflict.items()))
        if len(conflict) < 3:
            gone = {pair for pair in self.left if pair >= self._conflicts[-1]}
            self.left -= gone
            self.number -= len(gone)

    def _conflicts_in(self, row: dict[str, Any]) -> bool:
        values = set(row.items())
        return any(conflict <= values for conflict in self._conflicts)


class Search:
    """The runs of one trainer.

    Args:
        kind: Of trainer.
        folder: For the runs and the file.
    """

    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.found, self._tries = kind, folder, Found(), 0
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Run rows that have all pairs of values between them, and a few values by themselves."""
        values = {}
        # In a fork: a config that is made sets variables of its process.
        named = in_fork(self.folder / "values", lambda: settings.values_of(self.kind)).well()
        for name, others in named.items():
            if name in settings.ALONE:
                self._run_alone(name, others)
            elif len(others) > _MANY:  # of which most lack a package
                others = self._run_alone(name, others, max_steps=2)
            if others and name not in settings.ALONE:
                values[name] = others
        pairs = Pairs(values, random.Random(self.kind))
        self.found.num_pairs = pairs.number
        while pairs.left and not self._is_over():
            row = pairs.row()
            if self._take(row):
                self.found.covered += pairs.cover(row)
            else:
                pairs.exclude(self._culprits(row))
            self.found.num_pairs = pairs.number
            self._write()
            print(f"{len(pairs.left)} pairs left after {self.found.num_runs} runs", flush=True)
        self._write()

    def _run_alone(self, name: str, values: list[Any], **more: Any) -> list[Any]:
        """Return the values with which a run comes to its end and is resumed, the others being the job's."""
        ran = []
        for value in values:
            if self._is_over():
                break
            if self._take({name: value}, **more):
                ran.append(value)
            else:
                self._note({name: value}, self._reason)
        return ran

    def _attempt(self, row: dict[str, Any], **more: Any) -> dict[str, Any]:
        self._tries += 1
        given = {name: value for name, value in row.items() if value is not None}
        return attempt(self.kind, given, self.folder / f"{self._tries:05}", self._tries, **more)

    def _take(self, row: dict[str, Any], **more: Any) -> bool:
        """Note what comes of a row; return whether it ran and was resumed."""
        result = self._attempt(row, **more)
        short = {name: value for name, value in row.items() if value is not None}
        if "different" not in result:
            self._reason = result
            return False
        self.found.num_runs += 1
        for step, differences in result["different"].items():
            self.found.different[f"{_text(short)} from step {step}"] = differences
        self._write()
        return True

    def _note(self, row: dict[str, Any], result: dict[str, Any]) -> None:
        for what in ("refused", "broken"):
            if what in result:
                getattr(self.found, what)[_text(row)] = result[what][:300]

    def _culprits(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the fewest of a row's values with which a run does not come to its end, and note them."""
        sentence = str(self._reason)
        left = {name: value for name, value in row.items() if value is not None}
        named = {name: value for name, value in left.items() if name in sentence}
        how = {"is_built_only": True} if "when" in self._reason else {"max_steps": 2}
        if 0 < len(named) < len(left) and "different" not in (result := self._attempt(named, **how)):
            left, self._reason = named, result
        size = len(left) // 2
        while size:
            names = list(left)
            for start in range(0, len(names), size):
                fewer = {n: left[n] for n in left if n not in names[start : start + size]}
                if fewer and "different" not in (result := self._attempt(fewer, **how)):
                    left, self._reason = fewer, result
            size //= 2
        self._note(left, self._reason)
        return left

    def _is_over(self) -> bool:
        return time.monotonic() - self._began_s > LIMIT_S

    def _write(self) -> None:
        self.found.seconds = round(time.monotonic() - self._began_s, 1)
        (self.folder / FILE).write_text(json.dumps(asdict(self.found), indent=1))


def _text(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(row.items()))


def main(kind: str, folder: Path) -> None:
    """Search, and write what was found."""
    prepare()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    gc.freeze()  # a fork copies a page on its first write, and collecting writes on all
    Search(kind, folder).run()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
